"""What clients want their text to be, by each name that there is for it."""

import json

import pytest

from pdserve.core.errors import InvalidRequestError
from pdserve.core.request import Grammar, GrammarKind
from router.structured_output import ANY_OBJECT, grammar_of

MAX_BYTES = 1000
SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "null"}}}
JSON, REGEX = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX
LARK, EBNF = GrammarKind.LARK, GrammarKind.EBNF
NAMED = {"name": "n", "strict": True, "description": "d", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("field", "value", "kind", "text", "named"),
    [
        ("response_format", {"type": "json_object"}, JSON, ANY_OBJECT, "response_format"),
        (
            "response_format",
            {"type": "json_schema", "json_schema": NAMED},
            JSON,
            json.dumps(SCHEMA),
            "response_format.json_schema.schema",
        ),
        ("guided_json", SCHEMA, JSON, json.dumps(SCHEMA), "guided_json"),
        ("guided_json", json.dumps(SCHEMA), JSON, json.dumps(SCHEMA), "guided_json"),
        ("json_schema", json.dumps(SCHEMA), JSON, json.dumps(SCHEMA), "json_schema"),
        ("guided_regex", "a+", REGEX, "a+", "guided_regex"),
        ("regex", "a+", REGEX, "a+", "regex"),
        ("guided_grammar", 'root ::= "a"', EBNF, 'root ::= "a"', "guided_grammar"),
        ("ebnf", 'start: "a"', EBNF, 'start: "a"', "ebnf"),
        ("guided_choice", ["a", 'b"\n'], LARK, 'start: "a" | "b\\"\\n"', "guided_choice"),
        (
            "structured_outputs",
            {"json": SCHEMA, "regex": None},
            JSON,
            json.dumps(SCHEMA),
            "structured_outputs.json",
        ),
        (
            "structured_outputs",
            {"json_object": True},
            JSON,
            ANY_OBJECT,
            "structured_outputs.json_object",
        ),
        ("structured_outputs", {"choice": ["é"]}, LARK, 'start: "é"', "structured_outputs.choice"),
    ],
)
def test_every_name_gives_its_grammar(field, value, kind, text, named):
    assert grammar_of({"regex": None, field: value}, MAX_BYTES) == Grammar(
        kind=kind, text=text, field=named
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None, "regex": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False, "regex": None}},
    ],
)
def test_what_asks_for_nothing_gives_none(fields):
    assert grammar_of(fields, MAX_BYTES) is None


def test_two_are_one_too_many():
    with pytest.raises(InvalidRequestError, match="regex: only one of it and guided_choice"):
        grammar_of({"guided_choice": ["a"], "regex": "a"}, MAX_BYTES)


@pytest.mark.parametrize("field", ["guided_json", "json_schema"])
def test_a_key_that_comes_twice_in_a_schemas_text_is_refused_by_its_name(field):
    text = '{"type": "object", "properties": {"a": {"minimum": 1, "minimum": 2}}}'
    with pytest.raises(InvalidRequestError, match=f"{field}: 'minimum' is given twice in one obj"):
        grammar_of({field: text}, MAX_BYTES)


def test_of_very_many_outputs_few_are_named_in_the_refusal():
    outputs = {f"name {i}": 1 for i in range(10_000)}
    with pytest.raises(InvalidRequestError, match="only one of 'name 0', 'name 1'") as raised:
        grammar_of({"structured_outputs": outputs}, MAX_BYTES)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize("size", [MAX_BYTES, MAX_BYTES + 1])
@pytest.mark.parametrize("letter", ["a", "é", "😀"])
def test_a_schemas_text_is_measured_in_bytes(size, letter):
    """As grammars are; what is too long is not parsed, so nobody sees what is wrong with it."""
    text = f'{{"title": "{letter * 100}"}}'
    text += " " * (size - len(text.encode()))
    if size == MAX_BYTES:
        assert grammar_of({"guided_json": text}, MAX_BYTES) is not None
        return
    with pytest.raises(InvalidRequestError, match=f"^guided_json: got {size} bytes, at most 1000 "):
        grammar_of({"guided_json": text[:-1] + "]"}, MAX_BYTES)
