"""docs/configuration.md has every key, as the configuration's classes have it now."""

import dataclasses
import typing

import pytest

from pdserve.core.config import ClusterConfig
from scripts.config_doc import PAGE, file_comments, sections, with_tables

TEXT = PAGE.read_text(encoding="utf-8")
SECTIONS = sections()


def test_the_tables_are_fresh() -> None:
    assert with_tables(TEXT) == TEXT, "run `make docs`"


def keys_of(cls: type, where: str = "") -> set[str]:
    """Every key by its dotted path, those of sections in lists too."""
    found: set[str] = set()
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        path = f"{where}.{field.name}" if where else field.name
        hint = hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            found |= keys_of(hint, path)
            continue
        found.add(path)
        for inner in typing.get_args(hint):
            if isinstance(inner, type) and dataclasses.is_dataclass(inner):
                found |= keys_of(inner, f"{path}[]")
    return found


def test_every_key_has_a_line_that_says_what_it_is() -> None:
    keys = [key for section in SECTIONS for key in section.keys]
    assert {key.path for key in keys} == keys_of(ClusterConfig)
    assert [key.path for key in keys if not key.meaning] == []


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.path)
def test_a_section_says_what_it_is_for(section: object) -> None:
    assert getattr(section, "meaning", "")


def test_comments_of_a_cluster_file_go_to_the_key_that_they_stand_beside() -> None:
    lines = [
        "# top",
        "a:  # the first",
        "  b: 1  # one",
        "  # and more",
        "  c: 2",
        "d: [1]  # last",
    ]
    text = "\n".join(lines)
    assert file_comments(text) == {"a": "the first", "a.b": "one and more", "a.c": "", "d": "last"}
