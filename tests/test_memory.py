"""Free memory where Linux limits a container or a job, by files as its documentation has them."""

import psutil
import pytest

from hf_hyperconn.conversion.verify import numeric as memory

GIB = 2**30
OF_THE_SECOND = {"memory.max": 4 * GIB, "memory.current": 3 * GIB, "memory.stat": f"anon 7\ninactive_file {2 * GIB}\n"}
OF_THE_FIRST = {
    "memory.limit_in_bytes": 4 * GIB,
    "memory.usage_in_bytes": 3 * GIB,
    "memory.stat": f"cache 5\ninactive_file 1\ntotal_inactive_file {2 * GIB}\n",
}
NONE = {"memory.max": "max", "memory.current": 3 * GIB}
OF_THE_FIRST_NONE = {"memory.limit_in_bytes": 2**63 - 4096, "memory.usage_in_bytes": 3 * GIB}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/job/step\n", {"job/step": NONE, "job": OF_THE_SECOND}, 3 * GIB),
        ("0::/\n", {"": OF_THE_SECOND}, 3 * GIB),
        ("0::/\n", {"": NONE}, 64 * GIB),
        ("0::/\n", {}, 64 * GIB),
        ("5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n", {"memory/job": OF_THE_FIRST}, 3 * GIB),
        ("4:memory:/docker/of-the-host\n", {"memory": OF_THE_FIRST}, 3 * GIB),
        ("4:memory:/job\n", {"memory/job": OF_THE_FIRST_NONE}, 64 * GIB),
        ("1:name=systemd:/\n", {"": OF_THE_SECOND}, 64 * GIB),
        ("", {}, 64 * GIB),
        ("no line of this\n\n", {"": NONE}, 64 * GIB),
    ],
)
def test_the_strictest_limit_counts(groups, files, expected, tmp_path, monkeypatch):
    """Of files, Linux keeps in memory what it can give back."""
    (tmp_path / "cgroup").write_text(groups)
    for folder, contents in files.items():
        for name, content in contents.items():
            path = tmp_path / "mounted" / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{content}\n")
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "MOUNTED", tmp_path / "mounted")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 64 * GIB}))
    assert memory.free_memory() == expected


def test_here():
    assert 0 < memory.free_memory() <= psutil.virtual_memory().total
