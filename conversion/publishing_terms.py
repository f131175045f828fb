"""A base that isn't public, or asks for terms to be accepted, doesn't become public by oversight."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hf_hyperconn.errors import PushError

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

LICENCE, GATE = "license", "extra_gated_"


def check_terms(base: str, info: "ModelInfo | None", repo_id: str, card: Path, say: Callable[[str], None]) -> None:
    """Make sure that a public repo may hold a conversion of `base`.

    Of a gated, private or unreadable base, the card must name a licence, and must carry over the licence and the
    gating fields (`extra_gated_*`) of the base's own card, as far as the Hub shows it.

    base: Hub id; `info` is what the Hub says of it, None when it says nothing to this user.
    repo_id: the public repo.
    card: its README.md, which needn't exist.
    say: called with a line of advice when a gated base goes on.

    Raises `PushError` when it mayn't.
    """
    if info and not (info.gated or info.private):
        return
    theirs = info.card_data.to_dict() if info and info.card_data else {}
    terms = {field: value for field, value in theirs.items() if field.startswith((LICENCE, GATE))}
    ours = _metadata(card)
    lacking = [LICENCE] if not ours.get(LICENCE) else []
    lacking += [
        field
        for field, value in terms.items()
        if field not in ours or (field.startswith(LICENCE) and ours[field] != value)
    ]
    state = "can't be read" if info is None else "is gated" if info.gated else "is private"
    if lacking:
        raise PushError(
            f"the base {base!r} {state}, and {repo_id!r} would be public. Give --private, or a README.md whose "
            f"metadata carries the base's terms over (missing or different: {', '.join(dict.fromkeys(lacking))}); "
            f"`hf-hyperconn card` writes one."
        )
    if info and info.gated:
        say(f"gated base    a card doesn't gate: have access asked for in the settings of {repo_id!r}")


def _metadata(card: Path) -> dict:
    from huggingface_hub.repocard import metadata_load
    from yaml import YAMLError

    if not card.is_file():
        return {}
    try:
        return metadata_load(card) or {}
    except (ValueError, YAMLError) as error:
        raise PushError(f"the metadata of '{card}' can't be read ({error}). Mend it, and push again.") from error
