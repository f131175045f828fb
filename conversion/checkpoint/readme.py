"""The README.md of a model: metadata that a conversion inherits from its base, and the sections of a card.

A generated section stands between two marks. The first one contains a digest of the generated text:

    <!-- hf-hyperconn: limitations 0123abcd -->
    ...
    <!-- /hf-hyperconn -->

Text outside the marks, or with another digest, was written by a person and is kept.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_hyperconn.errors import CardError

from ..files.reading import read_text
from .source import Source, fetch

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

README = "README.md"
# fields of the base's metadata: of its terms, and others that are inherited
LICENSE_FIELDS = ("license", "license_name", "license_link")
GATED = "extra_gated_"
INHERITED = ("language", "tags")
LARGEST_INHERITED = 100_000  # values, written out

# tags about formats, programs and origins of the base's files, which are not true of a conversion
NOT_INHERITED = {
    *("pytorch", "tf", "jax", "flax", "rust", "safetensors", "onnx", "gguf", "mlx", "openvino", "transformers"),
    *("text-generation-inference", "endpoints_compatible", "autotrain_compatible", "vllm", "nemo", "unsloth"),
    *("generated_from_trainer", "merge", "mergekit", "facebook", "meta"),
}

CLOSED = "<!-- /hf-hyperconn -->"
SECTION = re.compile(
    rf"<!-- hf-hyperconn: (?P<name>[a-z-]+)(?: (?P<digest>[0-9a-f]{{8}}))? -->\n(?P<text>.*?){CLOSED}\n?",
    re.DOTALL,
)
LARGEST_CARD, LARGEST_METADATA = 10_000_000, 256_000  # bytes, and characters of YAML, which is slow to read
MODEL_ID = re.compile(r'^model_id = ".*$', re.MULTILINE)  # the line of the quick start that names the model
HEADING = re.compile(r"^(?=#{1,6} )", re.MULTILINE)

# the first line of the comment in a README.md by Transformers' Trainer, which asks for its own removal
BY_TRAINER = "<!-- This model card has been generated automatically according to the information the Trainer had"
EVALUATED = "It achieves the following results on the evaluation set:"
UNWRITTEN = "More information needed"
RESULTS = "Results on the evaluation set"
TRAINER_FACTS = (RESULTS, "Training hyperparameters", "Training results", "Framework versions")


def read_card(path: Path, *, lenient: bool = False) -> "ModelCard":
    """Return metadata (`data`) and text (`text`) of a README.md.

    lenient: whether a `model-index` that can't be read is left out.

    Raises `CardError` when the file can't be read, is not text, or its metadata is no YAML mapping without aliases.
    """
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    try:
        content = read_text(path, LARGEST_CARD)
        if not content.lstrip().startswith("---"):
            content = f"---\n\n---\n{content}"
        _check_metadata(content)
        card = ModelCard(content, ignore_metadata_errors=lenient)
        data: Any = card.data
        data.language = _languages(data.language)
        json.dumps(card.data.to_dict(), ensure_ascii=False, default=str, skipkeys=True).encode()
        return card
    except OSError as error:
        raise CardError(f"can't read '{path}': {error.strerror}. Allow that, or remove it.") from error
    except (ValueError, TypeError, AttributeError, YAMLError, RecursionError) as error:
        raise CardError(
            f"the metadata of '{path}' can't be read: {error}. Fix the text between its two lines of '---', or "
            f"remove the file."
        ) from error


def _check_metadata(content: str) -> None:
    """Raise `ValueError` or `YAMLError` for metadata with aliases, or too long to be read."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK
    from yaml import AliasEvent, SafeLoader, compose

    class WithoutAliases(SafeLoader):
        def compose_node(self, parent, index):
            if self.check_event(AliasEvent):
                event = self.peek_event()
                raise ValueError(f"line {event.start_mark.line + 1} has an alias, *{event.anchor:.40}: write it out")
            return super().compose_node(parent, index)

    if match := REGEX_YAML_BLOCK.search(content):  # as ModelCard looks for them
        if len(match[2]) > LARGEST_METADATA:
            raise ValueError(f"they are longer than {LARGEST_METADATA:,} characters")
        compose(match[2], Loader=WithoutAliases)


def _languages(value):
    """Return languages as they were written: YAML reads Norwegian's code, no, as false."""
    if isinstance(value, list):
        return [_languages(language) for language in value]
    return "no" if value is False else value


def is_term(field: str) -> bool:
    """Tell whether a field of a card's metadata states its license, or its form for access."""
    return field in LICENSE_FIELDS or field.startswith(GATED)


def read_base_card(source: Source) -> dict:
    """Return the metadata that a conversion of `source` inherits; empty when no metadata can be read.

    Raises `UnsupportedCheckpointError` when the Hub can't be reached for it.
    """
    return _inherited(source.path(README)) if 0 < source.files.get(README, 0) <= LARGEST_CARD else {}


def fetch_base_card(model: str, commit: str | None) -> dict:
    """Return the metadata that a conversion of a model on the Hub inherits.

    Raises `UnsupportedCheckpointError` when the Hub refuses or can't be reached, and the card is not in the cache.
    """
    path = fetch(model, README, commit)
    return {} if path is None else _inherited(path)


def license_fields(metadata: dict) -> dict:
    """Return the fields of the license in a card's metadata that are text."""
    return {name: value for name, value in metadata.items() if name in LICENSE_FIELDS and _is_text(value)}


def inheritable(metadata: dict) -> dict:
    """Return the part of a base's metadata that its conversion inherits; nothing if it is no JSON."""
    kept = {name: value for name, value in metadata.items() if name in INHERITED or name.startswith(GATED)}
    kept |= license_fields(metadata)
    if isinstance(kept.get("tags"), list):
        kept["tags"] = [tag for tag in kept["tags"] if isinstance(tag, str) and tag.lower() not in NOT_INHERITED]
    else:
        kept.pop("tags", None)
    encoder = json.JSONEncoder(default=str, skipkeys=True)  # YAML knows dates, JSON does not
    try:
        return json.loads("".join(islice(encoder.iterencode(kept), LARGEST_INHERITED)))
    except (ValueError, RecursionError):  # a mapping within itself, or text that is cut off
        return {}


def _inherited(path: Path) -> dict:
    try:
        return inheritable(read_card(path, lenient=True).data.to_dict())
    except CardError:
        return {}


def _is_text(value) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))


def is_ours(text: str) -> bool:
    """Tell whether there are generated sections in the text of a card."""
    return any(_sections(text))


def is_by_trainer(text: str) -> bool:
    """Tell whether Transformers' Trainer wrote this text of a card, and its comment is still there."""
    return BY_TRAINER in text and not is_ours(text)


def add_digests(text: str) -> str:
    """Add digests to the sections of a text that was just generated."""

    def marked(section: re.Match) -> str:
        return _section(section["name"], section["text"])

    return _with_sections(re.sub(r"\n{3,}", "\n\n", text), marked)


def with_repo_name(text: str, repo_id: str) -> str:
    """Name a repo of the Hub in the quick start of a card, unless a person has edited that section."""

    def named(section: re.Match) -> str:
        if section["name"] != "quick-start" or section["digest"] != _digest(section["text"]):
            return section[0]
        return _section(section["name"], MODEL_ID.sub(lambda line: f'model_id = "{repo_id}"', section["text"]))

    return _with_sections(text, named)


def merge(old: str, new: str) -> tuple[str, tuple[str, ...]]:
    """Put the generated sections of `new`, which is stamped, into the text `old`.

    A section that `old` lacks comes after its predecessor in `new`. A section that `new` lacks stays.

    Returns the text, and the names of the sections that stayed: edited, or not generated this time.
    """
    fresh = {section["name"]: section[0] for section in _sections(new)}
    kept = []

    def renew(section: re.Match) -> str:
        name = section["name"]
        if name in fresh and section["digest"] == _digest(section["text"]):
            return fresh[name]
        kept.append(name)
        return section[0]

    text = _with_sections(old, renew)
    previous = None
    for name, section in fresh.items():
        places = {match["name"]: match for match in _sections(text)}
        if name not in places:
            first = min((match.start() for match in places.values()), default=len(text))
            after = places[previous].end() if previous in places else first
            text = f"{text[:after].rstrip()}\n\n{section}\n{text[after:].lstrip()}".lstrip()
        previous = name
    return text.rstrip() + "\n", tuple(kept)


def trainer_facts(text: str) -> str:
    """Return the facts of the training from a Trainer's card, also when it has become part of one of ours."""
    if is_ours(text):
        text = "".join(section["text"] for section in _sections(text) if section["name"] == "training")
    facts = []
    for heading, block in _by_headings(text):
        content = block.partition("\n")[2].strip()
        if EVALUATED in content:
            facts.append(f"### {RESULTS}\n\n{content.partition(EVALUATED)[2].strip()}")
        elif heading in TRAINER_FACTS and content not in ("", UNWRITTEN):
            facts.append(f"### {heading}\n\n{content}")
    return "\n\n".join(facts)


def text_by_people(text: str) -> str:
    """Return a person's text from a Trainer's card: completed sections of Trainer, and new ones."""
    by_trainer = (*TRAINER_FACTS, "Training procedure")
    return "".join(
        block
        for heading, block in _by_headings(text)[1:]  # after the title and Trainer's description of the model
        if heading not in by_trainer and block.partition("\n")[2].strip() != UNWRITTEN
    ).strip()


def _sections(text: str) -> Iterator[re.Match]:
    """Find the generated sections of a text, no further than the last closing mark.

    After it, each opening mark would be followed to the end of the text.
    """
    return SECTION.finditer(text, 0, _end_of_sections(text))


def _with_sections(text: str, renewed: Callable[[re.Match], str]) -> str:
    """Replace each section of a text."""
    end = _end_of_sections(text)
    return SECTION.sub(renewed, text[:end]) + text[end:]


def _end_of_sections(text: str) -> int:
    last = text.rfind(CLOSED)
    return 0 if last < 0 else last + len(f"{CLOSED}\n")


def _by_headings(text: str) -> list[tuple[str, str]]:
    """Return each heading, and the text from it up to the next one."""
    blocks = [block for block in HEADING.split(text) if block.startswith("#")]
    return [(block.partition("\n")[0].lstrip("# ").rstrip(), block) for block in blocks]


def _section(name: str, text: str) -> str:
    """Return a section between its marks, with the digest of its text."""
    return f"<!-- hf-hyperconn: {name} {_digest(text)} -->\n{text}{CLOSED}\n"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
