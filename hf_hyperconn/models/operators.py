# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""The names of operators that a compiler does not look into."""

import re


def operator_namespace(module: str) -> str:
    """What a module registers its operators under: another for every name, of whatever characters.

    A process may hold several copies of a module, each with a Hub repo and named after its folder.
    """
    escaped = re.sub("[^0-9A-Za-z]", lambda found: "__" if found[0] == "_" else f"_{ord(found[0]):x}_", module)
    return f"hc_{escaped}"
