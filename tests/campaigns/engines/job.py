"""What every engine's script reads and writes; without this package, which their environments don't have.

Reads a job in JSON from the file that is named first: folder, dtype, options, prompts, new_tokens, adapter. Writes to
the second, for each time that the prompts are asked: tokens, the most likely log-probabilities by token, and how many
tokens of the prompt were in the cache.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

TIMES = 2  # the second time, prompts longer than a block are in the cache


def read_job() -> dict:
    return json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))


def write_answers(answers: list[list[dict]], engine: str) -> None:
    versions = {name: version(name) for name in (engine, "transformers", "torch")}
    Path(sys.argv[2]).write_text(json.dumps({"answers": answers, "versions": versions}), encoding="utf-8")
