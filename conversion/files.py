"""Files of a checkpoint's folder: written whole or not at all, and not outside of it."""

from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Make a file hold `content`, in one step; when that fails, it is as it was.

    A link is replaced, not what it leads to. Raises `OSError`.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.unlink(missing_ok=True)  # left by a process that was killed, or a link to somewhere else
        with part.open("xb") as file:
            file.write(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def leads_out(folder: Path, path: Path) -> bool:
    """Whether a path in a folder leads out of it, by a symbolic link.

    In a snapshot of the Hub's cache, links to the files of that cache do not.
    """
    folder, target = folder.resolve(), path.resolve()
    is_of_cache = folder.parent.name == "snapshots" and target.parent == folder.parents[1] / "blobs"
    return not (target.is_relative_to(folder) or is_of_cache)
