"""Generate the tables of docs/configuration.md; with --check, only say whether they are fresh.

A key's type and default are those of its dataclass in `pdserve/core/config.py`; what it means is
its comment in `cluster.yaml`, which shows every key, else its comment beside the dataclass.
"""

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path

from pdserve.core.config import ClusterConfig

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "configuration.md"
BEGIN, END = "<!-- keys: made by `make docs` -->\n", "<!-- end of keys -->\n"
WORDS = {str: "string", int: "whole number", float: "number", bool: "true or false"}
YAML_KEY = re.compile(r"( *)([a-z_]+):(?: +[^#]*?)??(?: +# ?(.*))?$")
YAML_MORE = re.compile(r" +# ?(.*)$")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One line of a table."""

    path: str
    type_words: str
    default: str
    meaning: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A dataclass of the configuration, and where it stands."""

    path: str
    meaning: str
    keys: tuple[Key, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    check = parser.parse_args().check
    present = PAGE.read_text(encoding="utf-8")
    fresh = with_tables(present)
    if fresh == present:
        return 0
    if check:
        print(f"stale: {PAGE.relative_to(ROOT)} (run `make docs`)")
        return 1
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


def with_tables(page: str) -> str:
    """The page with tables of the keys that there are."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{PAGE} has not the two lines between which the tables stand")
    return head + begin + "\n" + "\n".join(map(_table, sections())) + "\n" + end + tail


def sections() -> list[Section]:
    """All sections, in the order of the cluster file."""
    comments = file_comments((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    return list(_sections(ClusterConfig, "", comments))


def file_comments(text: str) -> dict[str, str]:
    """What `cluster.yaml` says of each key, by its dotted path."""
    comments: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        if match := YAML_KEY.match(line):
            indent = len(match[1])
            path = [*(entry for entry in path if entry[0] < indent), (indent, match[2])]
            comments[".".join(name for _, name in path)] = match[3] or ""
        elif path and (match := YAML_MORE.match(line)):
            name = ".".join(name for _, name in path)
            comments[name] = f"{comments[name]} {match[1]}".strip()
    return comments


def _sections(cls: type, where: str, comments: dict[str, str]) -> Iterator[Section]:
    hints, beside = typing.get_type_hints(cls), source_comments(cls)
    keys: list[Key] = []
    below: list[tuple[type, str]] = []
    for field in dataclasses.fields(cls):
        path = f"{where}.{field.name}" if where else field.name
        hint = hints[field.name]
        meaning = comments.get(path) or beside.get(field.name, "")
        inner = _inner_class(hint)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            below.append((hint, path))
            continue
        if inner is not None:
            below.append((inner, f"{path}[]"))
        keys.append(
            Key(
                path=path,
                type_words=_type_words(hint),
                default=_default(field),
                meaning=meaning or _as_another(path, comments, keys),
            )
        )
    if keys:
        said = comments.get(where) or (inspect.getdoc(cls) or "").partition("\n")[0]
        yield Section(path=where, meaning=said, keys=tuple(keys))
    for inner_cls, path in below:
        yield from _sections(inner_cls, path, comments)


def source_comments(cls: type) -> dict[str, str]:
    """The comment beside each field of a class."""
    module = importlib.import_module(cls.__module__)
    lines = inspect.getsource(module).splitlines()
    (node,) = (
        node
        for node in ast.parse("\n".join(lines)).body
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__
    )
    found = {}
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert field.end_lineno is not None
            text = "\n".join(lines[field.lineno - 1 : field.end_lineno])
            comment = " ".join(re.findall(r"  # (.*)", text))
            found[field.target.id] = re.sub(r"\bNone\b", "null", comment)
    return found


def _as_another(path: str, comments: dict[str, str], before: list[Key]) -> str:
    """Where nothing is said: a decode key is the prefill key, others belong to the one before."""
    other = path.replace("decode.", "prefill.", 1)
    if path.startswith("decode.") and other in comments:
        return f"as `{other}`"
    return f"see `{before[-1].path.rpartition('.')[2]}`" if before else ""


def _inner_class(hint: object) -> type | None:
    for inner in typing.get_args(hint):
        if isinstance(inner, type) and dataclasses.is_dataclass(inner):
            return inner
    return None


def _type_words(hint: object) -> str:
    if isinstance(hint, types.UnionType):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return f"{_type_words(inner[0])}, or null"
    if typing.get_origin(hint) is tuple:
        first, *others = typing.get_args(hint)
        if others == [Ellipsis]:
            words = "sections" if dataclasses.is_dataclass(first) else f"{_type_words(first)}s"
            return f"list of {words}"
        return f"list of {1 + len(others)} {_type_words(first)}s"
    assert isinstance(hint, type)
    return WORDS[hint]


def _default(field: "dataclasses.Field[object]") -> str:
    if field.default is dataclasses.MISSING:
        return "must be given"
    if isinstance(field.default, tuple) and any(map(dataclasses.is_dataclass, field.default)):
        return "as in `cluster.yaml`"
    return f"`{json.dumps(field.default)}`"


def _table(section: Section) -> str:
    title = f"## `{section.path}`\n"
    said = textwrap.fill(_sentence(section.meaning), width=100) + "\n"
    rows = ["| key | type | default | |", "|---|---|---|---|"]
    for key in section.keys:
        name = key.path.rpartition(".")[2]
        meaning = key.meaning.replace("|", "\\|")
        rows.append(f"| `{name}` | {key.type_words} | {key.default} | {meaning} |")
    return "\n".join([title, said, *rows]) + "\n"


def _sentence(text: str) -> str:
    text = f"see `{text}`" if text.startswith("docs/") else text.replace("``", "`")
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


if __name__ == "__main__":
    sys.exit(main())
