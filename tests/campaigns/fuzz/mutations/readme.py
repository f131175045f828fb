"""Mutations of README.md."""

import random

from .values import Target, free, read, sparse

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)
METADATA = {
    "a bomb of aliases": BOMB,
    "an alias": "license: &l mit\nlicense_name: *l\n",
    "a loop": "a: &a [*a]\n",
    "broken": "license: [mit\n",
    "a list": "- license\n- mit\n",
    "a text": "license\n",
    "tabs": "license:\tmit\n\ttags: x\n",
    "a tag of Python": "license: !!python/object/apply:os.system ['true']\n",
    "a merge": "a: &a {b: 1}\nc:\n  <<: *a\n",
    "nested deep": "license: " + "[" * 3000 + "]" * 3000 + "\n",
    "dates and numbers": "license: 2024-01-01\nlanguage: 3\ntags: 1.5\nlicense_link: null\nlibrary_name: no\n",
    "wrong types": "license: {a: 1}\ntags: {b: 2}\nlanguage: [[en]]\nlicense_link: [1]\nextra_gated_prompt: {}\n",
    "links out": "license: other\nlicense_link: ../../outside/secret.txt\nlicense_name: ../x\n",
    "control characters": 'license: "\\x1b[31mred"\ntags: ["\\u202e", "\\0"]\n',
    "long": "license: " + "m" * 10**6 + "\n",
    "wide": "tags: [" + "x, " * 10**5 + "x]\n",
    "keys twice": "license: mit\nlicense: apache-2.0\nlicense: [1]\n",
    "results": "model-index:\n- name: x\n  results: 3\n",
    "more results": "model-index: nonsense\n",
    "keys that are no text": "1: 2\nnull: 3\n? [a, b]\n: c\n",
    "Llama's licence": "license: llama3.2\nextra_gated_fields: {Name: text}\nbase_model: 3\ndatasets: {}\n",
}
MARKS = ("<!-- hf-hyperconn: a -->", "<!-- hf-hyperconn: limitations 01234567 -->\n", "<!-- /hf-hyperconn -->", "<!--")


def metadata(target: Target, pick: random.Random) -> str:
    kind = pick.choice([*METADATA, "a bomb of aliases"])
    path = target.folder / "README.md"
    text = read(path).decode(errors="replace")
    body = text.partition("\n---\n")[2] if pick.random() < 0.7 else "# Mine\n"
    opening, line_end = (
        pick.choice(["---\n", "---\n", "---\n---\n", "\n\n---\n"]),
        pick.choice(["\n", "\n", "\r", "\r\n"]),
    )
    content = f"{opening}{METADATA[kind]}---\n{body}".replace("\n", line_end)
    free(path).write_bytes(content.encode())
    return f"metadata of README.md: {kind} after {opening!r}, lines ending in {line_end!r}"


def marks(target: Target, pick: random.Random) -> str:
    path, mark, count = target.folder / "README.md", pick.choice(MARKS), pick.choice([1, 2, 20_000])
    text = read(path).decode(errors="replace")
    place = pick.randrange(len(text) + 1)
    free(path).write_text(text[:place] + mark * count + text[place:], encoding="utf-8")
    return f"README.md: {count} times {mark!r}"


def text(target: Target, pick: random.Random) -> str:
    path = target.folder / "README.md"
    now = read(path)
    kinds = {
        "empty": b"",
        "not UTF-8": now + b"\xff\xfe\x80",
        "UTF-16": now.decode(errors="replace").encode("utf-16"),
        "with a byte order mark": b"\xef\xbb\xbf" + now,
        "without an end of its metadata": b"---\nlicense: mit\n",
        "with Windows' ends of lines": now.replace(b"\n", b"\r\n"),
        "cut short": now[: pick.randrange(len(now) + 1)],
        "random bytes": pick.randbytes(500),
        "many rules": b"---\n" * 50_000,
        "one long line": b"---" + b" " * 10**6 + b"x",
        "a user's": b"# My notes\n\nNothing generated here.\n",
        "a template": b"---\nlicense: mit\n---\n{{ self.__class__ }} {% for x in range(10**9) %}x{% endfor %}\n",
        "with zero bytes": now.replace(b" ", b"\x00"),
    }
    kind = pick.choice(list(kinds))
    free(path).write_bytes(kinds[kind])
    return f"README.md: {kind}"


def huge(target: Target, pick: random.Random) -> str:
    sparse(target.folder / "README.md")
    return "README.md is huge"


ALL = (metadata, metadata, metadata, marks, text, text, huge)
