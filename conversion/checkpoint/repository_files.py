"""The names of a model's files in a repo on the Hub, besides config, weights and code."""

import re
from fnmatch import fnmatchcase

from .checkpoint_files import INDEX, WEIGHTS
from .readme import README
from .source import RECORD

# of every tokenizer of Transformers, and of mistral-common
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "normalizer.json"),
    *("vocab.json", "vocab.txt", "vocab.bpe", "merges.txt", "bpe.codes", "dict.txt", "byte_maps.json", "emoji.json"),
    *("tokenizer.model", "tokenizer.model.v[0-9]", "tokenizer.model.v[0-9]m[0-9]", "tokenizer.model.v[0-9][0-9]"),
    *("spiece.model", "spm.model", "spm_char.model", "sentencepiece.model", "sentencepiece.bpe.model"),
    *("source.spm", "target.spm", "vocab-src.json", "vocab-tgt.json", "target_vocab.json", "entity_vocab.json"),
    *("tiktoken.model", "*.tiktoken", "tekken.json", "prophetnet.tokenizer"),
    *("word_shape.json", "word_pronunciation.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
CONFIGS = (
    *("generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("video_preprocessor_config.json", "audio_tokenizer_config.json"),
    *("modules.json", "config_sentence_transformers.json", "sentence_*_config.json"),
)
MODULE = ("config.json", "*_config.json", "model.safetensors")
ABOUT = (
    *(RECORD, README, ".eval_results/*.yaml"),
    *(f"figures/*.{suffix}" for suffix in ("png", "svg", "jpg", "jpeg", "webp", "pdf")),
)
LICENSE = re.compile(
    r"(licen[cs]es?|copying|notices?|use[-_]policy)([-_ ][\w -]*(\.\d+)*)?(\.(txt|md|rst|pdf|html))?", re.IGNORECASE
)

# weights that Transformers would load instead of the index's, and an adapter, which it would load into them
OTHER_WEIGHTS = re.compile(
    rf"{re.escape(WEIGHTS)}|{re.escape(INDEX)}|model-\d{{5}}-of-\d{{5}}\.safetensors|adapter_config\.json",
    re.IGNORECASE,
)
NOT_FOR_A_REPO = re.compile(r"(.*/)?\.(git|cache)/.*", re.DOTALL)


def belongs(name: str) -> bool:
    """Tell whether a file goes with a model: of its tokenizer, processor, license, record, card or figures."""
    listed = any(_matches(name, pattern) for pattern in (*TOKENIZER, *CONFIGS, *ABOUT))
    return listed or LICENSE.fullmatch(name) is not None


def is_of_tokenizer(name: str) -> bool:
    """Tell whether a file is of a tokenizer, by its name."""
    return any(_matches(name, pattern) for pattern in TOKENIZER)


def belongs_to_module(name: str) -> bool:
    """Tell whether a file goes with the module of sentence-transformers in its folder."""
    own = name.rpartition("/")[2]
    return any(fnmatchcase(own, pattern) for pattern in MODULE) or (belongs(own) and own != README)


def may_be_added(name: str) -> bool:
    """Tell whether a file that does not belong may be uploaded by `--include`.

    Files of git and of downloads may not, nor weights that would be loaded instead of the model's.
    """
    return not (OTHER_WEIGHTS.fullmatch(name) or NOT_FOR_A_REPO.fullmatch(name))


def _matches(name: str, pattern: str) -> bool:
    """Tell whether a path matches a pattern, whose `*` is within one folder."""
    return name.count("/") == pattern.count("/") and fnmatchcase(name, pattern)
