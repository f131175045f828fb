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

families = pytest.mark.parametrize("model_type", few(FAMILIES, "llama", "qwen2"))

LOAD = """
import json, sys
from transformers import AutoTokenizer
text, *folders = sys.argv[1:]
load = lambda folder: AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
print(json.dumps({folder: [type(load(folder)).__name__, load(folder)(text).input_ids] for folder in folders}))
"""


@pytest.fixture(scope="module")
def folders(model_types, tmp_path_factory):
    """Base and conversion by family and claimed class."""
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    tokenizer.train_from_iterator([TEXT] * 50, trainer)
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
