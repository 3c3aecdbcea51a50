"""The process that compiles grammars before anything is spent on them."""

import asyncio
import os
import resource
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.cluster.open_files import allow_open_files
from pdserve.core.config import LimitsConfig
from pdserve.core.errors import InvalidRequestError, OverloadedError, ShuttingDownError
from pdserve.core.model_spec import read_model_spec
from pdserve.core.request import Grammar, GrammarKind
from router.grammar_checks import MAX_WAITING, GrammarChecks
from tests.text.tiny_models import save, with_half_a_byte

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOURS = '{"type": "integer", "multipleOf": 9999991}'  # what this takes to compile


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def checks(model_dir: Path) -> AsyncIterator[GrammarChecks]:
    limits = LimitsConfig(grammar_timeout_s=0.5, max_grammar_bytes=20_000)
    made = GrammarChecks(model_dir, read_model_spec(model_dir), limits)
    yield made
    made.close()


def schema(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=text, field="guided_json")


def grammar(kind: str, text: str) -> Grammar:
    return Grammar(kind=GrammarKind(kind), text=text, field="here")


def chain(length: int) -> str:
    """Rules of rules, on which the library recurses."""
    rules = [f"r{i}: r{i + 1}" for i in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "a"'])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("lark", chain(100)),
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
        ("regex", "a" * 20_001, "20001 bytes"),
        ("regex", "\ud800", "Unicode"),
        ("json_schema", '{"const": "\\ud800"}', "hex escape"),
        ("ebnf", "root ::= " + "(" * 2000 + '"a"' + ")" * 2000, "recursion depth exceeded"),
        ("lark", chain(1500), "^here: it is nested too deeply$"),
        (
            "json_schema",
            '{"items":' * 400 + "{}" + "}" * 400,
            "nested too deeply",
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


@pytest.mark.parametrize("is_seen", [True, False])
async def test_a_process_that_somebody_ended_is_made_anew(checks, is_seen):
    """The kernel does where memory is short; the next grammar is not at fault."""
    await checks.check(schema('{"const": "before"}'))
    process = checks._process
    process.kill()
    if is_seen:
        process.wait()
    await checks.check(schema(f'{{"const": "after {is_seen}"}}'))
    assert checks._process.pid != process.pid


SPEAKS_ONCE = "print('ready', flush=True); input(); raise SystemExit({status})"


@pytest_asyncio.fixture(loop_scope="module")
async def in_vain(checks: GrammarChecks) -> AsyncIterator[Callable[[str], None]]:
    """Start processes of another program from now on, to the test's end."""
    command = checks._command

    def start(program: str) -> None:
        checks._end()
        checks._command = [sys.executable, "-c", program]

    yield start
    checks._end()
    checks._command = command


@pytest.mark.parametrize("status", [0, 1])
async def test_a_grammar_is_not_to_blame_for_a_process_that_ends_otherwise(
    checks, in_vain, status, caplog
):
    good = schema(f'{{"const": "blameless {status}"}}')
    in_vain(SPEAKS_ONCE.format(status=status))
    with pytest.raises(OverloadedError, match=f"ended 2 times, status {status}$"):
        await checks.check(good)
    assert [record.args for record in caplog.records] == [(status,)] * 2
    in_vain("import os, time; print('ready', flush=True); input(); os.kill(os.getpid(), 9)")
    with pytest.raises(OverloadedError, match=r"ended 2 times, status -9$"):
        await checks.check(good)


async def test_what_was_not_found_out_is_not_kept(checks, in_vain):
    once = schema('{"const": "asked again"}')
    command = checks._command
    in_vain(SPEAKS_ONCE.format(status=1))
    with pytest.raises(OverloadedError):
        await checks.check(once)
    checks._command = command
    await checks.check(once)


async def test_a_grammar_for_which_there_is_no_memory_is_refused_and_that_is_kept(
    model_dir: Path,
) -> None:
    limits = LimitsConfig(max_grammar_bytes=50 << 20)
    checks = GrammarChecks(model_dir, read_model_spec(model_dir), limits)
    try:
        await checks.check(schema('{"const": "small"}'))
        process = checks._process
        assert process is not None
        resource.prlimit(process.pid, resource.RLIMIT_AS, (1, 1))  # it gets no more
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="here: compiling it takes too much mem"):
                await checks.check(grammar("regex", "a" * (40 << 20)))
        assert checks._process is None, "the second time it was known"
        await checks.check(schema('{"const": "small too"}'))
    finally:
        checks.close()


async def test_closing_ends_what_is_compiled_and_starts_nothing_more(model_dir: Path) -> None:
    limits = LimitsConfig(grammar_timeout_s=60.0)
    checks = GrammarChecks(model_dir, read_model_spec(model_dir), limits)
    await checks.check(schema('{"type": "null"}'))
    asking = asyncio.create_task(checks.check(schema(HOURS)))
    await asyncio.sleep(0.1)  # it compiles, or is about to
    checks.close()
    with pytest.raises(ShuttingDownError):
        await asking
    assert checks._process is None


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
