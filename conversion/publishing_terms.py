"""A base that isn't public, or asks for terms to be accepted, doesn't become public by oversight."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hf_hyperconn.errors import PushError

from .base_card import is_term

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

LICENCE = "license"


def check_terms(base: str, info: "ModelInfo | None", repo_id: str, metadata: dict, say: Callable[[str], None]) -> None:
    """Make sure that a public repo may hold a conversion of `base`.

    Of a gated, private or unreadable base, the card must name a licence, and must carry over the licence and the
    gating fields (`extra_gated_*`) of the base's own card, as far as the Hub shows it.

    base: Hub id; `info` is what the Hub says of it, None when it says nothing to this user.
    repo_id: the public repo.
    metadata: of its card; empty when it has none.
    say: called with a line of advice when a gated base goes on.

    Raises `PushError` when it mayn't.
    """
    if info and not (info.gated or info.private):
        return
    theirs = info.card_data.to_dict() if info and info.card_data else {}
    lacking = [LICENCE] if not metadata.get(LICENCE) else []
    lacking += [
        field
        for field, value in theirs.items()
        if is_term(field) and not _is_carried_over(base, field, value, metadata)
    ]
    state = "can't be read" if info is None else "is gated" if info.gated else "is private"
    if lacking:
        raise PushError(
            f"the base {base!r} {state}, and {repo_id!r} would be public. Give --private, or a README.md whose "
            f"metadata carries the base's terms over (missing or different: {', '.join(dict.fromkeys(lacking))}); "
            f"`hf-hyperconn card` writes what is missing."
        )
    if info and info.gated:
        say(f"gated base    a card doesn't gate a repo: switch gating on in the settings of {repo_id!r}")


def _is_carried_over(base: str, field: str, value: Any, metadata: dict) -> bool:
    """Whether the metadata of a card holds a term of the base's: a licence is the same, what gates is there."""
    if field not in metadata or not field.startswith(LICENCE):
        return field in metadata
    if metadata[field] == value:
        return True
    # where no copy of the licence lies beside the weights, a card links to the base's
    link = rf"https://huggingface\.co/{re.escape(base)}/blob/[^/]+/{re.escape(str(value))}"
    return field == f"{LICENCE}_link" and re.fullmatch(link, str(metadata[field])) is not None
