"""Mutations of what only a conversion has: its record, and results of lm-eval beside it."""

import random

from .values import Target, not_json, read_json, set_somewhere, sparse, strange, write_json

RECORD = "hyperconn_conversion.json"
ELSEWHERE = (
    "../outside/secret.txt",
    "/etc/passwd",
    "",
    ".",
    "missing",
    "README.md",
    "\x1b[31m",
    "config.json",
    "a" * 300,
)


def anything(target: Target, pick: random.Random) -> str:
    record = read_json(target.folder / RECORD)
    said = set_somewhere(record, pick)
    write_json(target.folder / RECORD, record)
    return f"record: {said}"


def base(target: Target, pick: random.Random) -> str:
    record = read_json(target.folder / RECORD)
    record["base"] = pick.choice(
        [{"model": "org/sharded"}, {"commit": "0" * 40}, {}, None, {"model": "a/b", "commit": "main"}]
        + [{"model": "../outside", "commit": None}, {"model": "\x1b[31m/x", "commit": "f" * 40}, strange(pick)]
    )
    write_json(target.folder / RECORD, record)
    return f"record: base = {record['base']!r:.60}"


def files(target: Target, pick: random.Random) -> str:
    record, name = read_json(target.folder / RECORD), pick.choice(ELSEWHERE)
    match pick.randrange(4):
        case 0:
            pick.choice(record["base_shards"])["file"] = name
        case 1:
            pick.choice(record["base_shards"])["source"] = name
        case 2:
            record["hyper_connection_shard"] = name
        case 3:
            record["files"] = {**record.get("files", {}), name: pick.choice(["0" * 64, None, 3, strange(pick)])}
    write_json(target.folder / RECORD, record)
    return f"record: a file {name!r:.60}"


def no_json(target: Target, pick: random.Random) -> str:
    return not_json(target.folder / RECORD, pick)


def huge(target: Target, pick: random.Random) -> str:
    sparse(target.folder / RECORD)
    return "the record is huge"


def gone(target: Target, pick: random.Random) -> str:
    (target.folder / RECORD).unlink()
    return "the record is missing"


ALL = (anything, anything, anything, base, files, no_json, huge, gone)
