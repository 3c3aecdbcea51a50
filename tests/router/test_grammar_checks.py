"""The process that compiles grammars before anything is spent on them."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.cluster.open_files import allow_open_files
from pdserve.core.config import LimitsConfig
from pdserve.core.errors import InvalidRequestError, OverloadedError
from pdserve.core.model_spec import read_model_spec
from pdserve.core.request import Grammar, GrammarKind
from router.grammar_checks import MAX_WAITING, GrammarChecks
from tests.text.tiny_models import save, with_half_a_byte

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOURS = '{"type": "integer", "multipleOf": 9999991}'  # what this takes to compile


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def checks(model_dir: Path) -> AsyncIterator[GrammarChecks]:
    limits = LimitsConfig(grammar_timeout_s=0.5, max_grammar_bytes=10_000)
    made = GrammarChecks(model_dir, read_model_spec(model_dir), limits)
    yield made
    made.close()


def schema(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=text, field="guided_json")


def grammar(kind: str, text: str) -> Grammar:
    return Grammar(kind=GrammarKind(kind), text=text, field="here")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type": "object"}'),
        (
            "json_schema",
            '{"$defs": {"n": {"type": "object", "properties": '
            '{"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}',
        ),
        ("json_schema", '{"enum": [9007199254740992], "default": 9007199254740993}'),
        ("regex", "(a+)+$"),
        ("regex", "[ab]*a[ab]{40}"),
        ("ebnf", 'root ::= "yes" | "no"'),
        ("ebnf", 'start: "a" start | "b"'),
        ("lark", 'start: "😀"'),
    ],
)
async def test_what_can_be_followed_is_let_through(checks, kind, text):
    await checks.check(grammar(kind, text))


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("json_schema", '{"type": "bogus"}', "bogus"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        (
            "json_schema",
            '{"type": "array", "uniqueItems": true, "x-guidance": {"lenient": true}}',
            "uniqueItems",
        ),
        ("json_schema", '{"type": "string", "format": "made-up"}', "made-up"),
        ("json_schema", '{"$ref": "#/$defs/nobody"}', "nobody"),
        ("json_schema", '{"$ref": "http://example.com/schema"}', "example.com"),
        ("json_schema", '{"$ref": "#"}', "no text can match"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum"),
        ("json_schema", '{"type": "string", "pattern": "("}', "unclosed"),
        ("json_schema", "[]", "object"),
        (
            "json_schema",
            '{"enum": [1, {"a": [9007199254740993]}]}',
            "enum: 9007199254740993 cannot",
        ),
        (
            "json_schema",
            '{"items": {"const": -9007199254740993}}',
            "const: -9007199254740993 cannot",
        ),
        (
            "json_schema",
            '{"properties": {"a": {"type": "integer", "minimum": 9007199254740993}}}',
            "minimum: 9007199254740993 cannot",
        ),
        ("regex", "(", "unclosed"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"(a)\1", "backreference"),
        ("regex", "(" * 3000 + "a" + ")*" * 3000, "regex"),
        ("ebnf", "root ::= [", "GBNF"),
        ("ebnf", "start: nobody", "nobody"),
        ("ebnf", 'root ::= "a" root', "Too many items"),
        ("ebnf", 'root ::= "a" root | root "b"', "Too many items"),
        ("lark", "start: start", "no text can match"),
        ("regex", "a" * 10_001, "10001 bytes"),
        ("regex", "\ud800", "Unicode"),
        ("json_schema", '{"const": "\\ud800"}', "hex escape"),
        (
            "json_schema",
            '{"items":' * 400 + "{}" + "}" * 400,
            "recursion",
        ),
    ],
)
async def test_what_cannot_is_refused_by_its_field_and_reason(checks, kind, text, problem):
    with pytest.raises(InvalidRequestError, match=problem) as raised:
        await checks.check(grammar(kind, text))
    assert raised.value.field == "here"
    assert len(str(raised.value)) < 400


async def test_what_takes_too_long_is_ended_and_the_next_one_is_served(checks):
    with pytest.raises(InvalidRequestError, match="grammar_timeout_s"):
        await checks.check(schema(HOURS))
    await checks.check(schema('{"type": "null"}'))
    began_s = time.monotonic()
    with pytest.raises(InvalidRequestError, match="grammar_timeout_s"):
        await checks.check(schema(HOURS))  # it is known
    assert time.monotonic() - began_s < 0.5


async def test_very_many_new_grammars_at_once_are_told_to_come_later(checks):
    new = [schema(f'{{"const": {i}}}') for i in range(MAX_WAITING + 5)]
    results = await asyncio.gather(*map(checks.check, new), return_exceptions=True)
    assert sum(isinstance(result, OverloadedError) for result in results) == 5
    assert sum(result is None for result in results) == MAX_WAITING


async def test_a_check_that_nobody_waits_for_disturbs_nobody(checks):
    asking = asyncio.create_task(checks.check(schema('{"const": "left"}')))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await checks.check(schema('{"const": "stays"}'))


async def test_of_a_model_whose_answers_cannot_follow_any_it_is_said(
    tmp_path: Path, model_dir: Path
) -> None:
    model = read_model_spec(model_dir)
    checks = GrammarChecks(save(tmp_path / "model", with_half_a_byte()), model, LimitsConfig())
    try:
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="answers of this model cannot"):
                await checks.check(grammar("regex", "a+"))
    finally:
        checks.close()


async def test_grammars_are_compiled_while_there_are_very_many_connections(
    model_dir: Path,
) -> None:
    """select() knows the first 1,024 files of a process alone."""
    allow_open_files()
    checks = GrammarChecks(model_dir, read_model_spec(model_dir), LimitsConfig())
    with ExitStack() as held:
        held.callback(checks.close)
        for _ in range(1100):
            held.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        await checks.check(schema('{"type": "object"}'))
