"""How much memory a process may still take, also where a container or a job has a limit."""

import re
from pathlib import Path

import psutil

GROUPS = Path("/proc/self/cgroup")  # of Linux: a line for each hierarchy, `number:controllers:path`
MOUNTED = Path("/sys/fs/cgroup")
# of both versions: the folder of the hierarchy, the files of the limit and of what is used, and what of this is cache
VERSIONS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def free_memory() -> int:
    """Bytes that may be taken without swapping: what is free on the machine, or what the strictest limit leaves."""
    return min([psutil.virtual_memory().available, *_left_by_limits()])


def _left_by_limits() -> list[int]:
    """What each limit on this process, and on the groups that it is in, leaves."""
    left = []
    for line in _text(GROUPS).splitlines():
        if line.count(":") < 2:  # none of a hierarchy
            continue
        _, controllers, path = line.split(":", 2)
        version = "memory" if "memory" in controllers.split(",") else controllers
        if version not in VERSIONS:
            continue
        hierarchy, limit, used, cached = VERSIONS[version]
        group = MOUNTED / hierarchy / path.lstrip("/")
        for each in (group, *group.parents):
            if not each.is_relative_to(MOUNTED):
                break
            numbers = [_text(each / name).strip() for name in (limit, used)]
            if all(map(str.isdecimal, numbers)):  # else there is no limit
                of_files = re.search(rf"^{cached} (\d+)$", _text(each / "memory.stat"), re.MULTILINE)
                left.append(int(numbers[0]) - int(numbers[1]) + int(of_files[1] if of_files else 0))
    return left


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
