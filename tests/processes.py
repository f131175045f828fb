"""Running `elsewhere.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path


def elsewhere(jobs: list[dict], place: Path) -> dict[str, list[str]]:
    """What processes that can't import hf_hyperconn, one for each job, find to differ; they run side by side."""
    running = []
    for i, job in enumerate(jobs):
        file = place / f"job {i}.json"
        file.write_text(json.dumps(job))
        with file.open() as stdin:
            running.append(
                subprocess.Popen(
                    [sys.executable, Path(__file__).with_name("elsewhere.py")],
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "HF_MODULES_CACHE": str(place / f"modules {i}"), "PYTHONPATH": ""},
                )
            )
    found = {}
    for process in running:
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        found |= json.loads(output)
    return found
