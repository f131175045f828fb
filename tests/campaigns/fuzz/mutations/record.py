"""Mutations of what only a conversion has: its record, and results of lm-eval beside it."""

import random

from .values import Target, edited, set_somewhere, spoiled, strange

RECORD = "hyperconn_conversion.json"
ELSEWHERE = (
    *("../outside/secret.txt", "/etc/passwd", "", ".", "missing", "README.md", "\x1b[31m", "config.json", "a" * 300),
)


def anything(target: Target, pick: random.Random) -> str:
    with edited(target.folder / RECORD) as record:
        said = set_somewhere(record, pick)
    return f"record: {said}"


def base(target: Target, pick: random.Random) -> str:
    with edited(target.folder / RECORD) as record:
        record["base"] = pick.choice(
            [{"model": "org/sharded"}, {"commit": "0" * 40}, {}, None, {"model": "a/b", "commit": "main"}]
            + [{"model": "../outside", "commit": None}, {"model": "\x1b[31m/x", "commit": "f" * 40}, strange(pick)]
        )
    return f"record: base = {record['base']!r:.60}"


def files(target: Target, pick: random.Random) -> str:
    name = pick.choice(ELSEWHERE)
    with edited(target.folder / RECORD) as record:
        match pick.choice(["file", "source", "hyper_connection_shard", "files"]):
            case "hyper_connection_shard":
                record["hyper_connection_shard"] = name
            case "files":
                record["files"] = {**record.get("files", {}), name: pick.choice(["0" * 64, None, 3, strange(pick)])}
            case key:
                pick.choice(record["base_shards"])[key] = name
    return f"record: a file {name!r:.60}"


ALL = (anything, anything, anything, base, files, *spoiled(RECORD))
