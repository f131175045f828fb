"""AutoTokenizer gives a conversion the tokenizer of its base, whatever class the checkpoint claims."""

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from hf_hyperconn.conversion import cli

from .families import FAMILIES
from .isolated import printed
from .marks import few
from .tiny import tiny

CLAIMED = ("GPT2Tokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast")
TEXT = "In 1234567 words (2026/10/12):\n\n\tfoo.bar == 31415926, don't DON'T\n  x = 1000000"
# words and runs of up to three digits, as checkpoints since GPT-4 split text
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"

# Transformers corrects the split of Mistral's tokenizers, by their vocabulary and config, if this is true
FLAG, TOKENIZER = "fix_mistral_regex", "tokenizer_config.json"
LARGE = 100_001

STAND_FOR_ALL = ("llama", "mistral", "qwen2", "gemma2", "olmoe", "deepseek_v3")
families = pytest.mark.parametrize(
    "model_type", few(FAMILIES, "llama", "qwen2", tail=(each for each in FAMILIES if each not in STAND_FOR_ALL))
)

LOAD = """
import json, sys
from transformers import AutoTokenizer
text, *folders = sys.argv[1:]
load = lambda folder: AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
print(json.dumps({folder: [type(load(folder)).__name__, load(folder)(text).input_ids] for folder in folders}))
"""


def trained() -> Tokenizer:
    """A tokenizer that has learned the text's words and runs of digits."""
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    tokenizer.train_from_iterator([TEXT] * 50, trainer)
    return tokenizer


def enlarged(tokenizer: Tokenizer, size: int) -> Tokenizer:
    """The same with tokens of no use, as many as it takes."""
    parts = json.loads(tokenizer.to_str())
    vocabulary = parts["model"]["vocab"]
    vocabulary |= {f"<unused{i}>": i for i in range(len(vocabulary), size)}
    return Tokenizer.from_str(json.dumps(parts))


@pytest.fixture(scope="module")
def folders(model_types, tmp_path_factory):
    """Base and conversion by family and claimed class."""
    tokenizer = trained()
    place, folders = tmp_path_factory.mktemp("tokenizers"), {}
    for model_type in model_types:
        for claimed in CLAIMED:
            base, out = (place / f"{model_type}-{claimed}{suffix}" for suffix in ("", "-hc"))
            tiny(model_type).save_pretrained(base)
            tokenizer.save(str(base / "tokenizer.json"))
            config = {"tokenizer_class": claimed, "eos_token": "<|endoftext|>"}
            (base / "tokenizer_config.json").write_text(json.dumps(config))
            assert cli.main(["convert", str(base), str(out), "-q", "--verify", "off"]) == 0
            folders[model_type, claimed] = (str(base), str(out))
    return folders


@pytest.fixture(scope="module")
def loaded(folders, tmp_path_factory):
    """Class and token ids of every folder, in a process without this package."""
    arguments = (folder for pair in folders.values() for folder in pair)
    return json.loads(printed(LOAD, TEXT, *arguments, place=tmp_path_factory.mktemp("modules")))


@pytest.mark.parametrize("claimed", CLAIMED)
@families
def test_equal_without_the_package(model_type, claimed, folders, loaded):
    base, out = folders[model_type, claimed]
    assert loaded[out] == loaded[base]


@pytest.mark.parametrize("claimed", CLAIMED)
@families
def test_equal_with_the_package(model_type, claimed, folders):
    base, out = map(AutoTokenizer.from_pretrained, folders[model_type, claimed])
    assert type(out) is type(base)
    assert out(TEXT).input_ids == base(TEXT).input_ids


def old_mistral(
    base: Path, flag: bool | None = True, release: str | None = "4.57.1", model_type: str = "mistral"
) -> Path:
    """Save a base whose tokenizer Transformers corrects, by default."""
    tiny(model_type).save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "transformers_version": release}))
    enlarged(trained(), LARGE).save(str(base / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **({} if flag is None else {FLAG: flag})}
    (base / TOKENIZER).write_text(json.dumps(settings))
    return base


def converted(base: Path) -> Path:
    out = base.with_name("hc")
    assert cli.main(["convert", str(base), str(out), "-q", "--verify", "off"]) == 0
    return out


@pytest.mark.parametrize("release", ["4.57.1", "5.0.0rc1", None])
def test_a_base_whose_split_is_corrected_is_refused(release, tmp_path, capsys):
    base = old_mistral(tmp_path / "base", release=release)
    assert AutoTokenizer.from_pretrained(base)(TEXT).input_ids != trained().encode(TEXT).ids
    assert cli.main(["convert", str(base), str(tmp_path / "hc")]) == 1
    said = capsys.readouterr().err
    assert f"must be without {FLAG} (got True), which changes how text is split for mistral" in said
    assert "AutoTokenizer.from_pretrained(COPY).save_pretrained(COPY)" in said
    assert not (tmp_path / "hc").exists()


@pytest.mark.parametrize(
    "settings",
    [{"flag": None}, {"flag": False}, {"release": "5.0.0"}, {"model_type": "llama"}],
    ids=["no flag", "false", "new", "another type"],
)
def test_one_that_is_not_corrected_is_converted(settings, tmp_path):
    base = old_mistral(tmp_path / "base", **settings)
    expected = trained().encode(TEXT).ids
    assert [AutoTokenizer.from_pretrained(each)(TEXT).input_ids for each in (base, converted(base))] == [expected] * 2


def test_the_remedy_gives_the_corrected_split(tmp_path):
    base = old_mistral(tmp_path / "base")
    corrected = AutoTokenizer.from_pretrained(base)
    expected = corrected(TEXT).input_ids
    assert expected != trained().encode(TEXT).ids
    corrected.save_pretrained(base)
    settings = json.loads((base / TOKENIZER).read_text())
    assert settings.pop(FLAG)
    (base / TOKENIZER).write_text(json.dumps(settings))
    out = converted(base)
    assert [AutoTokenizer.from_pretrained(each)(TEXT).input_ids for each in (base, out)] == [expected] * 2
    found = json.loads(printed(LOAD, TEXT, base, out, place=tmp_path))
    assert [ids for _, ids in found.values()] == [expected] * 2
