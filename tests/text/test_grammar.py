"""Whatever a grammar allows is right: answers drawn at random from its masks keep to it."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from pdserve.core.errors import InvalidRequestError, ModelFilesError
from pdserve.core.request import Grammar, GrammarKind
from pdserve.text.grammar import GrammarCompiler, TokenMask, allows
from pdserve.text.schema_dates import with_real_dates
from pdserve.text.schema_numbers import MOST
from pdserve.text.tokenizer import Tokenizer
from pdserve.text.tool_grammar import calls_grammar
from pdserve.text.tool_parser import CallArguments, CallBegun, ToolParser
from pdserve.text.tools import TOOL_FORMATS, Tool
from tests.text.tiny_models import byte_fallback, byte_level, save, with_half_a_byte

END_OF = {"byte_level": 0, "byte_fallback": 2}
MAX_TOKENS = 3000
Model = tuple[Tokenizer, GrammarCompiler]


@pytest.fixture(scope="module", params=sorted(END_OF))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    backend = byte_level() if request.param == "byte_level" else byte_fallback()
    tokenizer = Tokenizer(save(tmp_path_factory.mktemp(request.param), backend))
    compiler = GrammarCompiler(
        tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=[END_OF[request.param]]
    )
    return tokenizer, compiler


def test_a_tokenizer_that_the_library_gives_up_on_is_named(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(tmp_path / "model", with_half_a_byte()))
    with pytest.raises(ModelFilesError, match=r"cannot follow grammars: its tokenizer: .*<0x"):
        GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=[2])


def tokens_of(mask: TokenMask) -> list[int]:
    return [i for i in range(8 * len(mask)) if allows(mask, i)]


def draw_answer(model: Model, grammar: Grammar, seed: int) -> str | None:
    """The text of an answer that takes any allowed token; None where it grows without end.

    Short tokens more often, as quotes and brackets are among those.
    """
    tokenizer, compiler = model
    draw, matcher, said = random.Random(seed), compiler.compile(grammar), bytearray()
    for _ in range(MAX_TOKENS):
        allowed = tokens_of(matcher.mask())
        assert allowed, "nothing may follow, and it is not over"
        lengths = [len(tokenizer.token_bytes(token_id)) for token_id in allowed]
        (token_id,) = draw.choices(allowed, [1 / (1 + length) ** 2 for length in lengths])
        if not tokenizer.is_special(token_id):
            said += tokenizer.token_bytes(token_id)
        assert matcher.advance([token_id])
        if matcher.is_complete:
            return said.decode()
    return None


@pytest.mark.parametrize(
    ("day", "is_real"),
    [
        *(("0000-01-01", False), ("0001-01-01", True), ("9999-12-31", True), ("2023-02-29", False)),
        *(("2024-02-29", True), ("1900-02-29", False), ("2000-02-29", True), ("2023-04-31", False)),
        *(("2023-12-31", True), ("2023-13-01", False), ("2023-00-10", False), ("0004-02-29", True)),
    ],
)
@pytest.mark.parametrize("form", ["date", "date-time"])
def test_dates_are_days_that_the_calendar_has(
    form: str, day: str, is_real: bool, model: Model
) -> None:
    tokenizer, compiler = model
    schema = json.dumps({"type": "array", "items": {"type": "string", "format": form}})
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=schema, field="schema")
    text = f'["{day}"]' if form == "date" else f'["{day}T23:59:00.5+01:00"]'
    spelled = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    tokens = [spelled[character.encode()] for character in text]
    assert compiler.compile(grammar).advance(tokens) == is_real


def test_dates_in_data_and_with_other_bounds_stay_as_they_are() -> None:
    schema = {
        "properties": {"format": {"const": {"format": "date"}}},
        "anyOf": [{"type": "string", "format": "date", "maxLength": 10}],
    }
    assert with_real_dates(schema) == schema


names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=4)
leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda least, more: {"type": "integer", "minimum": least, "maximum": least + more},
        st.integers(-1000, 1000),
        st.integers(0, 1000),
    ),
    st.builds(
        lambda least, more: {"type": "string", "minLength": least, "maxLength": least + more},
        st.integers(0, 3),
        st.integers(0, 5),
    ),
    st.lists(
        st.none() | st.booleans() | st.integers(-MOST, MOST) | names, min_size=1, max_size=4
    ).map(lambda values: {"enum": values}),
    st.just({"type": "string", "pattern": "^[a-c]{1,3}-[0-9]?$"}),
    st.sampled_from([{"type": "string", "format": each} for each in ("date", "ipv4", "uuid")]),
)


def _object(properties: dict[str, Any], required: set[int]) -> dict[str, Any]:
    listed = [name for i, name in enumerate(properties) if i in required]
    return {
        "type": "object",
        "properties": properties,
        "required": listed,
        "additionalProperties": False,
    }


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(names, inner, max_size=3), st.sets(st.integers(0, 2))),
        st.builds(
            lambda items, least, more: {
                "type": "array",
                "items": items,
                "minItems": least,
                "maxItems": least + more,
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda each: {"anyOf": each}),
    ),
    max_leaves=6,
)


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(schema=schemas, seed=st.integers(0, 1000))
def test_every_answer_to_a_schema_parses_and_validates(model, schema, seed):
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema), field="f")
    text = draw_answer(model, grammar, seed)
    assert text is not None
    checker = Draft202012Validator.FORMAT_CHECKER
    Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))


@settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    parameters=st.lists(
        st.builds(_object, st.dictionaries(names, leaves, max_size=2), st.sets(st.integers(0, 1))),
        min_size=1,
        max_size=3,
    ),
    written=st.sampled_from(sorted(TOOL_FORMATS)),
    several=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_forced_answer_is_calls_of_the_tools(model, parameters, written, several, seed):
    tools = [
        Tool(name=f"tool_{i}", description=None, parameters=each)
        for i, each in enumerate(parameters)
    ]
    form = TOOL_FORMATS[written]
    text = draw_answer(model, calls_grammar(tools, form, several=several), seed)
    assume(text is not None)  # calls without end
    assert text is not None
    known = frozenset(tool.name for tool in tools)
    parser = ToolParser(form, known, forced=True, most=None)
    calls: list[list[str]] = []
    for event in [*parser.push(text), *parser.flush()]:
        match event:
            case CallBegun(name=name):
                calls.append([name, ""])
            case CallArguments(json=arguments):
                calls[-1][1] += arguments
            case _:
                raise AssertionError(f"text beside the calls: {event}")
    assert len(calls) >= 1 if several else len(calls) == 1
    for name, arguments in calls:
        schema = parameters[int(name.removeprefix("tool_"))]
        Draft202012Validator(schema).validate(json.loads(arguments))


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        ("regex", "^foo( bar){0,2}$", "foo( bar){0,2}"),
        ("regex", "(?i)abc[0-9]{2}", "[aA][bB][cC][0-9]{2}"),
        ("lark", 'start: "é" | "😀!"', "é|😀!"),
        ("ebnf", 'root ::= "yes" | "no" [0-9]', "yes|no[0-9]"),
        ("ebnf", "start: WORD\nWORD: /[a-z]{1,4}/", "[a-z]{1,4}"),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_other_grammars_are_kept_to(model, kind, text, pattern, seed):
    grammar = Grammar(kind=GrammarKind(kind), text=text, field="f")
    answer = draw_answer(model, grammar, seed)
    assert answer is not None
    assert re.fullmatch(pattern, answer)


def test_a_recursive_schema_is_followed_to_where_the_answer_stops(model):
    schema = {
        "type": "object",
        "properties": {"v": {"enum": [1, 2]}, "next": {"$ref": "#"}},
        "required": ["v"],
        "additionalProperties": False,
    }
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema), field="f")
    texts = [draw_answer(model, grammar, seed) for seed in range(5)]
    for text in filter(None, texts):
        Draft202012Validator(schema).validate(json.loads(text))
    assert any(texts)


def test_a_json_answer_stands_in_one_line_without_more_white_space_than_it_needs(model):
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"const": [1, 2]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema), field="f")
    assert draw_answer(model, grammar, 0) == '{"a": 1, "b": [1, 2]}'


def test_the_client_cannot_loosen_what_is_kept_to(model):
    _, compiler = model
    schema = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema), field="f")
    with pytest.raises(InvalidRequestError, match="uniqueItems"):
        compiler.compile(grammar)
