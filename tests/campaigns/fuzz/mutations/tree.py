"""Mutations of what a folder holds: links, special files, names, permissions."""

import os
import random
import socket
import stat
from pathlib import Path

from .values import PRIVATE, SECRET, Target, free, read, remove, sparse

FILES = (
    *("config.json", "model.safetensors", "model.safetensors.index.json", "README.md", "tokenizer.json", "LICENSE"),
    *("generation_config.json", "tokenizer_config.json", "hyperconn_conversion.json", "notes.txt", "assets"),
)
NAMES = (
    *(b"n" * 245, b"n" * 255, b"not utf-8 \xff\xfe.txt", b"\x1b[31mred\x1b[0m.txt", b"two\nlines.txt", b"-rf", b" "),
    *(b"tab\t.txt", b"a\\b.txt", "\u202eback.txt".encode(), b"bell\x07", "²".encode(), b"*.json", b"c:", b"..."),
    *(b"nul\x01.safetensors", b"\xc2\x9b31m.txt", b"~", b"$HOME", b"'; true"),
    *("é" * 120 + ".txt", b"a" * 250 + b".json"),
)


def link_out(target: Target, pick: random.Random) -> str:
    """A link that leads to a secret outside, or to a copy of what it stands for there."""
    name = pick.choice([*FILES, "notes.txt", "notes.txt"])
    path, secret = target.folder / name, target.outside / "secret.txt"
    kind = pick.choice(["the secret", "the secret, relatively", "a folder", "its own content"])
    content = read(path) or SECRET
    remove(path)
    match kind:
        case "the secret":
            path.symlink_to(secret)
        case "the secret, relatively":
            path.symlink_to(os.path.relpath(secret, target.folder))
        case "a folder":
            path.symlink_to(target.outside)
        case "its own content":
            (target.outside / "content").write_bytes(content)
            path.symlink_to(target.outside / "content")
    return f"{name} is a link out, to {kind}"


def link_within(target: Target, pick: random.Random) -> str:
    name, other = pick.choice(FILES), pick.choice(FILES)
    path = target.folder / name
    remove(path)
    path.symlink_to(pick.choice([other, "nowhere", name, ".", "..", "assets", "../outside"]))
    return f"{name} is a link to {os.readlink(path)!r}"


def special(target: Target, pick: random.Random) -> str:
    """A file that is none: reading it blocks, never ends, or fails."""
    name = pick.choice(FILES)
    path = target.folder / name
    remove(path)
    return f"{name} is {make_special(path, pick)}"


def make_special(path: Path, pick: random.Random) -> str:
    """Put a special file, or a folder, at a path."""
    kinds = ["a pipe", "a socket", "a folder", "a link to /dev/zero"]
    if os.geteuid() == 0:
        kinds.append("a device")
    kind = pick.choice(kinds)
    match kind:
        case "a pipe":
            os.mkfifo(path)
        case "a socket":
            _socket(path)
        case "a folder":
            path.mkdir()
        case "a link to /dev/zero":
            path.symlink_to("/dev/zero")
        case "a device":
            try:
                os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))
            except PermissionError:  # root in a container
                os.mkfifo(path)
                return "a pipe"
    return kind


def _socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def names(target: Target, pick: random.Random) -> str:
    name = os.fsencode(pick.choice(NAMES))
    path = os.path.join(os.fsencode(target.folder), name[:255])
    if pick.random() < 0.8:
        with open(path, "wb") as file:
            file.write(b"named so")
    else:
        os.makedirs(path, exist_ok=True)
        with open(os.path.join(path, b"inside.txt"), "wb") as file:
            file.write(b"named so")
    return f"a file named {name!r:.60}"


def modes(target: Target, pick: random.Random) -> str:
    """Fewer permissions than usual; none at all bind everyone but root."""
    files = sorted(path for path in target.folder.iterdir() if path.is_file() and not path.is_symlink())
    path = pick.choice([*files, target.folder])
    choices = [0o700, 0o500] if path.is_dir() else [0o600, 0o400, 0o640, 0o444, 0o755]
    mode = pick.choice(choices if os.geteuid() == 0 else [*choices, 0o000])
    path.chmod(mode)
    return f"{path.name} has mode {mode:o}"


def all_private(target: Target, pick: random.Random) -> str:
    for path in target.folder.iterdir():
        if path.is_file() and not path.is_symlink():
            path.chmod(0o600)
    return "all files have mode 600"


def crowd(target: Target, pick: random.Random) -> str:
    """Many files, or many folders in each other."""
    if pick.random() < 0.5:
        (target.folder / "many").mkdir(exist_ok=True)
        for i in range(300):
            (target.folder / "many" / f"{i}.txt").write_text(str(i))
        return "300 files"
    folder = target.folder / "/".join(["d"] * 200)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "deep.txt").write_text("deep")
    return "200 folders in each other"


def another_model(target: Target, pick: random.Random) -> str:
    """A model in a folder of its own inside, and what training left."""
    inside = target.folder / pick.choice(["checkpoint-5", "last/checkpoint-5", "original", "other"])
    inside.mkdir(parents=True, exist_ok=True)
    (inside / "config.json").write_text("{}")
    (inside / "optimizer.pt").write_bytes(PRIVATE)
    return f"another model in {inside.name}"


def sparse_weights(target: Target, pick: random.Random) -> str:
    name = pick.choice(["model.safetensors", "extra.safetensors", "consolidated.00.pth", "model.gguf", "notes.txt"])
    sparse(free(target.folder / name))
    return f"{name} is huge"


ALL = (
    *(link_out, link_out, link_out, link_within, special, special, names, names, modes, all_private, crowd),
    *(another_model, sparse_weights),
)
