"""AutoTokenizer gives a conversion the tokenizer of its base, whatever class the checkpoint claims."""

import json

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
FLAG = "fix_mistral_regex"
LARGE = 100_001

families = pytest.mark.parametrize("model_type", few(FAMILIES, "llama", "qwen2"))

LOAD = """
import json, sys
from transformers import AutoTokenizer
text, *folders = sys.argv[1:]
load = lambda folder: AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
print(json.dumps({folder: [type(load(folder)).__name__, load(folder)(text).input_ids] for folder in folders}))
"""

LOAD_CORRECTED = """
import json, sys
from transformers import AutoTokenizer
text, keyword, folder = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True, **json.loads(keyword))
print(json.dumps(tokenizer(text).input_ids))
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


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    """Base and conversion of a Mistral whose tokenizer Transformers would correct."""
    place = tmp_path_factory.mktemp("mistral")
    base, out = place / "base", place / "hc"
    tiny("mistral").save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "transformers_version": "4.57.1"}))
    enlarged(trained(), LARGE).save(str(base / "tokenizer.json"))
    (base / "tokenizer_config.json").write_text("{}")
    assert cli.main(["convert", str(base), str(out), "-q", "--verify", "off"]) == 0
    return base, out


@pytest.mark.parametrize("package", [True, False], ids=["with the package", "without"])
@pytest.mark.parametrize(
    ("saved", "keyword", "corrected"),
    [(None, None, False), (False, None, False), (True, None, True), (None, True, True), (True, False, False)],
)
def test_a_split_is_corrected_as_for_the_base(saved, keyword, corrected, package, mistral, tmp_path):
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", FLAG: saved}
    keywords = {} if keyword is None else {FLAG: keyword}
    if saved is None:
        del settings[FLAG]
    ids = []
    for folder in mistral:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        if package:
            ids.append(AutoTokenizer.from_pretrained(folder, **keywords)(TEXT).input_ids)
        else:
            ids.append(json.loads(printed(LOAD_CORRECTED, TEXT, json.dumps(keywords), folder, place=tmp_path)))
    assert ids[1] == ids[0]
    assert (ids[0] != trained().encode(TEXT).ids) == corrected
