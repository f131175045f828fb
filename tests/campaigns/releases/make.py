"""Convert a tiny model of every model type whose code has branches cut from the Transformers that is there.

    python -m tests.campaigns.releases.make FOLDER [MODEL_TYPE ...]

Writes FOLDER/<model type>/base and FOLDER/<model type>/dhc4, and prints JSON: why others could not be made.
"""

import json
import sys
from pathlib import Path

from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.families.family import find_family
from hf_hyperconn.families.reading.source_files import table

from ..sweep import converted


def has_cut_branches(model_type: str) -> bool:
    """Return whether the code of a model type has branches of its own; no, too, where it can't have connections."""
    try:
        family = find_family(model_type)
    except UnsupportedCheckpointError:
        return False
    families = [family.part] if family.part else family.stacks
    return any(layer.is_cut for family in families for layer in family.source.layers)


def main(folder: str, *chosen: str) -> None:
    model_types = [name for name in chosen or sorted(table("CONFIG_MAPPING_NAMES")) if has_cut_branches(name)]
    failures = {name: converted(name, Path(folder)) for name in model_types}
    print("\n" + json.dumps({name: failure for name, failure in failures.items() if failure}))


if __name__ == "__main__":
    main(*sys.argv[1:])
