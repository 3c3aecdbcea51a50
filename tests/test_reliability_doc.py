"""What docs/reliability.md promises is tested by tests that there are."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "reliability.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)))
LISTED, _, NOT_COVERED = TEXT.partition("## What is not covered")
FAULTS = re.findall(r"^- \*\*.+?(?=^- |^#|\Z)", LISTED, re.MULTILINE | re.DOTALL)
UNTESTED = "**Not covered**: see the end"


@cache
def names_in(path: Path) -> frozenset[str]:
    """Functions and state machines of a file, those included that it imports."""
    names: list[str] = []
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.append(name)
            case ast.Assign(targets=[ast.Name(id=name)]):
                names.append(name)
            case ast.ImportFrom(names=imported):
                names += [alias.name for alias in imported]
    return frozenset(name for name in names if name.startswith(("test_", "Test")))


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_each_test_that_is_named_is_there(path: str, name: str) -> None:
    assert name in names_in(ROOT / path)


@pytest.mark.parametrize("fault", FAULTS, ids=range(len(FAULTS)))
def test_each_fault_names_a_test_or_is_said_to_have_none(fault: str) -> None:
    assert ("`tests/" in fault) != (UNTESTED in fault)


def test_what_is_not_covered_is_told_at_the_end() -> None:
    assert FAULTS
    assert "**NCCL.**" in NOT_COVERED
    assert "per GPU" in NOT_COVERED
