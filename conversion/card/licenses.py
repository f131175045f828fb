"""Duties under the licenses of bases that a card can state or check; docs/publishing.md lists the others."""

import re
from dataclasses import dataclass

META = "Meta Platforms, Inc. All Rights Reserved."
ALIBABA = "Copyright (c) Alibaba Cloud. All Rights Reserved."


@dataclass(frozen=True)
class Terms:
    """Duties under one license.

    notice: the line for a text file "Notice" that goes with the weights.
    display: words to display prominently.
    prefix: the required beginning of the model's name.
    restrictions: the page with the restrictions of use, which have to be passed on.
    """

    notice: str
    display: str | None = None
    prefix: str | None = None
    restrictions: str | None = None


def _llama(version: str) -> Terms:
    """Return the terms of the Llama 3.1, 3.2 and 3.3 Community License Agreements, Section 1.b."""
    return Terms(
        f"Llama {version} is licensed under the Llama {version} Community License, Copyright © {META}",
        display="Built with Llama",
        prefix="Llama",
        restrictions=f"https://www.llama.com/llama{version.replace('.', '_')}/use-policy",
    )


# by `license` in the metadata of a card, or by `license_name` where that is "other"
LICENSES = {
    # Llama 2 Community License Agreement, Section 1.b
    "llama2": Terms(
        f"Llama 2 is licensed under the LLAMA 2 Community License, Copyright (c) {META}",
        restrictions="https://ai.meta.com/llama/use-policy",
    ),
    # Meta Llama 3 Community License Agreement, Section 1.b
    "llama3": Terms(
        f"Meta Llama 3 is licensed under the Meta Llama 3 Community License, Copyright © {META}",
        display="Built with Meta Llama 3",
        prefix="Llama 3",
        restrictions="https://llama.meta.com/llama3/use-policy",
    ),
    **{f"llama{version}": _llama(version) for version in ("3.1", "3.2", "3.3")},
    # Gemma Terms of Use, Section 3.1
    "gemma": Terms(
        "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
        restrictions="https://ai.google.dev/gemma/prohibited_use_policy",
    ),
    # Qwen LICENSE AGREEMENT and Qwen RESEARCH LICENSE AGREEMENT, Sections 3 and 5 (4 of the latter)
    "qwen": Terms(f"Qwen is licensed under the Qwen LICENSE AGREEMENT, {ALIBABA}", display="Built with Qwen"),
    "qwen-research": Terms(
        f"Qwen is licensed under the Qwen RESEARCH LICENSE AGREEMENT, {ALIBABA}", display="Built with Qwen"
    ),
    # Tongyi Qianwen LICENSE AGREEMENT, Section 3
    "tongyi-qianwen": Terms(f"Tongyi Qianwen is licensed under the Tongyi Qianwen LICENSE AGREEMENT, {ALIBABA}"),
}


def license_of(metadata: dict) -> str | None:
    """Return the name of the license in a card's metadata, as the Hub or the base's publisher spells it."""
    license = metadata.get("license")
    if isinstance(license, list):
        license = license[0] if len(license) == 1 else ", ".join(map(str, license))
    return (metadata.get("license_name") or license) if license == "other" else license


def terms_of(metadata: dict) -> Terms | None:
    """Return the terms of the license in a card's metadata; None for a license that is not in `LICENSES`."""
    return LICENSES.get(str(license_of(metadata)).lower())


def name_problem(name: str, metadata: dict) -> str | None:
    """Explain why the license forbids a model's name; None if it doesn't."""
    terms = terms_of(metadata)
    if terms is None or terms.prefix is None or _letters(name).startswith(_letters(terms.prefix)):
        return None
    return (
        f"the license of the base ({license_of(metadata)}) requires that the name of a model made from it begin with "
        f"'{terms.prefix}'; '{name}' does not. Give it such a name where you publish it."
    )


def _letters(name: str) -> str:
    """Return a name without the separators of its words."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
