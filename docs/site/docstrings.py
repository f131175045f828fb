"""An extension of Griffe, which reads the code: where `hf_hyperconn.conversion` is, and lists in docstrings."""

import re

import griffe

ENTRY = re.compile(r"(\w+(?:, \w+)*)( \(.*\))?:(?: (.*))?")


class Package(griffe.Extension):
    """Reads `hf_hyperconn` as it is installed, and the parameters of docstrings as lists."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs) -> None:
        if pkg.path == "hf_hyperconn":
            pkg["conversion"] = loader.load("conversion")

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        if obj.docstring is not None:
            obj.docstring.value = "\n\n".join(map(as_list, obj.docstring.value.split("\n\n")))


def as_list(paragraph: str) -> str:
    """A paragraph of entries `name: what it is`, whose further lines are indented, as a list; any other as it is."""
    items: list[str] = []
    for line in paragraph.split("\n"):
        if items and line.startswith("    "):
            items[-1] += f" {line.strip()}"
        elif entry := ENTRY.fullmatch(line):
            names, kind, text = entry.groups(default="")
            items.append(f"- `{names.replace(', ', '`, `')}`{kind}: {text}")
        else:
            return paragraph
    return "\n".join(items)
