"""Where other disks, and volumes, are mounted."""

import os
import re
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")  # a line for each mount, its fifth word is the place


def mount_in(folder: Path) -> Path | None:
    """A folder itself, or one in it, where something is mounted, also a folder of the same disk; None without one.

    Where the system has no list of mounts, another folder of the same disk isn't noticed.
    """
    folder = Path(os.path.realpath(folder))
    return next((place for place in _places(folder) if place.is_relative_to(folder)), None)


def _places(folder: Path) -> list[Path]:
    try:
        lines = MOUNTS.read_bytes().splitlines()
    except OSError:
        return [Path(place) for place, _, _ in os.walk(folder) if os.path.ismount(place)]
    return [Path(os.fsdecode(_unescaped(line.split()[4]))) for line in lines]


def _unescaped(path: bytes) -> bytes:
    """A path of the list, in which spaces, tabs, line breaks and backslashes are octal."""
    return re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), path)
