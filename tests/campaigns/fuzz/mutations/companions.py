"""Mutations of what goes along: files of tokenizer, processor and generation, adapters, code, and private files."""

import random

from .index import write_pickle
from .values import OPENED, PRIVATE, Target, not_json, read_json, set_somewhere, sparse, strange, write_json

SETTINGS = (
    *("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("generation_config.json", "processor_config.json", "preprocessor_config.json", "chat_template.json"),
    *("video_preprocessor_config.json", "feature_extractor_config.json", "image_processor_config.json"),
)
AUTO_MAPS = (
    {"AutoTokenizer": ["evil/repo--tok.T", None]},
    {"AutoTokenizer": ["tok.T", "tok.T"]},
    {"AutoProcessor": "evil/repo--proc.P"},
    {"AutoImageProcessor": "tok.T"},
    {"AutoTokenizer": None},
    "tok.T",
    [],
)
# what is never part of a model that is passed on
PRIVATE_FILES = (
    *("random_states_0.pkl", "optimizer.pkl", "scaler.pickle", "model.joblib", "PYTORCH_MODEL.BIN", "id_rsa"),
    *("last/checkpoint-5/rng_state.pkl", "last/checkpoint-5/trainer_state.json", "token.txt", "trainer_state.json"),
    *("events.out.tfevents.1700000000.host.1.0", "training_args.bin", "optimizer.pt", "wandb/run.log", ".env"),
    *("rng_state_0.pth", ".netrc", "id_ed25519", "secrets.json", "checkpoint-10/optimizer.pt", "notes.ipynb"),
)
# names that the converter uses itself
CLASHING = (
    *("plan.json", ".plan.json.part", "hyperconn_conversion.json", "Notice", "model-00001-of-00002.safetensors.part"),
    *("modeling_hc_llama.py", "hyper_connections.py", ".config.json.part", "adapter_config.json/inside", "LICENSE.md"),
    *("model-00002-of-00002.safetensors", "model.safetensors.index.json.part", ".incomplete", "hc/config.json"),
)


def own_code(target: Target, pick: random.Random) -> str:
    """Code of a tokenizer or processor, which leaves a trace when it is run."""
    name = pick.choice([name for name in SETTINGS if name.endswith("config.json")])
    path = target.folder / name
    content = read_json(path) if path.is_file() else {}
    content["auto_map"] = pick.choice(AUTO_MAPS)
    write_json(path, content)
    if pick.random() < 0.5:
        trace = target.outside / OPENED
        (target.folder / "tok.py").write_text(f"open({str(trace)!r}, 'w')\n\n\nclass T:\n    pass\n")
    return f"auto_map of {name} = {content['auto_map']!r:.60}"


def settings(target: Target, pick: random.Random) -> str:
    path = target.folder / pick.choice([name for name in SETTINGS if (target.folder / name).is_file()])
    content = read_json(path)
    said = set_somewhere(content, pick) if content else "empty"
    write_json(path, content)
    return f"{path.name}: {said}"


def other_settings(target: Target, pick: random.Random) -> str:
    path = target.folder / pick.choice(SETTINGS)
    write_json(path, strange(pick))
    return f"{path.name} is a strange value"


LARGEST = 600_000_000  # bytes: far more than is read of such a file, and few enough to be sent


def no_json(target: Target, pick: random.Random) -> str:
    return not_json(target.folder / pick.choice(SETTINGS), pick)


def huge(target: Target, pick: random.Random) -> str:
    name = pick.choice([*SETTINGS, "LICENSE", "merges.txt", "tokenizer.model"])
    sparse(target.folder / name, LARGEST)
    return f"{name} is huge"


def adapter(target: Target, pick: random.Random) -> str:
    content = pick.choice([{"peft_type": "LORA", "base_model_name_or_path": "../outside"}, {}, [], strange(pick)])
    write_json(target.folder / "adapter_config.json", content)
    weights = pick.choice([None, "adapter_model.safetensors", "adapter_model.bin"])
    if weights == "adapter_model.bin":
        write_pickle(target, weights)
    elif weights:
        (target.folder / weights).write_bytes(pick.randbytes(64))
    return f"an adapter_config.json, and {weights or 'no weights'}"


PATHS = (
    *("", ".", "1_Dense", "1_Dense", "./1_Dense/", "..", "../outside", "/etc", "1_Dense/../../outside", ".git", "*"),
    *("checkpoint-5", "last", "templates", "1_Dense/deep", "\x1b[31m", "1_D\u202eense"),
)
CLASSES = ("sentence_transformers.models.Dense", "tok.T", "evil/repo--tok.T", "", "pylate.models.Dense.Dense")


def modules(target: Target, pick: random.Random) -> str:
    """Modules of sentence-transformers, some with weights, some elsewhere, some no modules."""
    found = [{"path": pick.choice(PATHS), "type": pick.choice([CLASSES[0], *CLASSES])} for _ in range(3)]
    write_json(target.folder / "modules.json", pick.choice([found, found, found, [], {}, strange(pick)]))
    (target.folder / "1_Dense").mkdir(exist_ok=True)
    write_json(target.folder / "1_Dense" / "config.json", pick.choice([{"in_features": 8}, {"auto_map": "tok.T"}, []]))
    weights = target.folder / "1_Dense" / "model.safetensors"
    kind = pick.choice(["weights", "a link out", "a pickle", "private files", "nothing"])
    match kind:
        case "weights":
            weights.write_bytes(pick.randbytes(64))
        case "a link out":
            weights.symlink_to(target.outside / "secret.txt")
        case "a pickle":
            write_pickle(target, "1_Dense/pytorch_model.bin")
        case "private files":
            for name in ("optimizer.pt", "id_rsa", ".env", "secrets.json"):
                (target.folder / "1_Dense" / name).write_bytes(PRIVATE)
    return f"modules.json names {[each['path'] for each in found]}, with {kind}"


def private(target: Target, pick: random.Random) -> str:
    name = pick.choice(PRIVATE_FILES)
    path = target.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(PRIVATE)
    return f"a private file {name}"


def clashing(target: Target, pick: random.Random) -> str:
    name = pick.choice(CLASHING)
    path = target.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() or pick.random() < 0.8:
        path.write_bytes(b"{}" if path.suffix == ".json" else b"of the user's own")
    else:
        path.mkdir()
    return f"a file {name} of the user's own"


def code(target: Target, pick: random.Random) -> str:
    """The model's code, where there is some."""
    files = sorted(target.folder.glob("*.py"))
    if not files:
        (target.folder / "modeling_llama.py").write_text("raise SystemExit('ran')\n")
        return "code of its own"
    path = pick.choice(files)
    kind = pick.choice(["appended to", "emptied", "removed", "joined by another"])
    match kind:
        case "appended to":
            path.write_text(path.read_text() + "\nprint('changed')\n")
        case "emptied":
            path.write_text("")
        case "removed":
            path.unlink()
        case "joined by another":
            path.with_name("more.py").write_text("print('more')\n")
    return f"{path.name} {kind}"


ALL = (
    *(own_code, own_code, settings, other_settings, no_json, huge, adapter, modules, modules, private, private),
    *(clashing, code, code),
)
