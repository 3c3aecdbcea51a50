"""Which values of a JSON schema are schemas, and what is looked for in them."""

import json
from typing import Any

import pytest

from pdserve.core.errors import InvalidRequestError
from pdserve.text.nesting import MAX_DEPTH, check_depth
from pdserve.text.schema_dates import with_real_dates
from pdserve.text.schema_for_grammar import schema_for_grammar
from pdserve.text.schema_numbers import MOST, check_numbers
from pdserve.text.schema_walk import schemas_in

NAMED = (
    "$defs",
    "definitions",
    "dependencies",
    "dependentSchemas",
    "patternProperties",
    "properties",
)
DATA = ("const", "default", "enum", "example", "examples")
KEYWORDS = (*NAMED, *DATA, "maximum", "format", "items", "anyOf")
TOO_MUCH = {"type": "integer", "maximum": MOST + 1}
DATE = {"type": "string", "format": "date"}


@pytest.mark.parametrize("name", KEYWORDS)
@pytest.mark.parametrize("keyword", NAMED)
def test_a_name_may_be_that_of_a_keyword(keyword: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"maximum: {MOST + 1} cannot be kept to"):
        check_numbers({keyword: {name: TOO_MUCH}})
    (changed,) = with_real_dates({keyword: {name: DATE}})[keyword].values()
    assert changed.keys() == {"type", "pattern"}
    remark = {keyword: {name: {"default": MOST + 1, "const": "x"}}}
    check_numbers(remark)
    assert with_real_dates(remark) == remark


@pytest.mark.parametrize(
    "schema",
    [
        {"items": TOO_MUCH},
        {"prefixItems": [{}, TOO_MUCH]},
        {"anyOf": [{"allOf": [{"not": TOO_MUCH}]}]},
        {"additionalProperties": {"properties": {"items": {"items": TOO_MUCH}}}},
        {"properties": {"properties": {"properties": {"properties": TOO_MUCH}}}},
        [TOO_MUCH],
    ],
)
def test_schemas_are_found_wherever_they_are(schema: Any) -> None:
    with pytest.raises(ValueError, match="maximum"):
        check_numbers(schema)
    spelled = json.dumps(schema).replace(json.dumps(TOO_MUCH), json.dumps(DATE))
    assert '"format"' not in json.dumps(with_real_dates(json.loads(spelled)))


@pytest.mark.parametrize("keyword", DATA)
def test_what_is_data_stays_as_it_is(keyword: str) -> None:
    schema = {keyword: [DATE, {"maximum": 1, "properties": {"a": DATE}}]}
    assert with_real_dates(schema) == schema
    assert list(schemas_in(schema)) == [schema]


@pytest.mark.parametrize("keyword", ["const", "enum"])
@pytest.mark.parametrize("value", [MOST + 1, [{"a": [-MOST - 1]}], {"maximum": MOST + 1}])
def test_numbers_that_an_answer_would_have_are_looked_at(keyword: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{keyword}: -?{MOST + 1} cannot be kept to"):
        check_numbers({"properties": {"a": {keyword: [value]}}})


@pytest.mark.parametrize("keyword", ["default", "example", "examples", "title", "x-note"])
@pytest.mark.parametrize("value", [MOST + 1, [MOST + 1]])
def test_numbers_that_bind_no_answer_are_not(keyword: str, value: Any) -> None:
    check_numbers({keyword: value, "maximum": MOST, "minimum": 1e300})


@pytest.mark.parametrize("value", [True, None, 3, "a", [], {}, {"properties": 3, "$defs": [True]}])
def test_what_is_no_schema_has_nothing_in_it(value: Any) -> None:
    check_numbers(value)
    assert with_real_dates(value) == value


def test_a_schema_is_changed_in_a_copy() -> None:
    schema = {"properties": {"day": dict(DATE)}, "required": ["day"]}
    changed = with_real_dates(schema)
    assert schema["properties"] == {"day": DATE}
    assert changed["properties"]["day"]["pattern"].startswith("^")
    assert changed["required"] == ["day"]


def nested(depth: int) -> Any:
    """Lists and objects by turns, one of them with a neighbour."""
    value: Any = 1
    for i in range(depth):
        value = [0, value] if i % 2 else {"a": value, "b": [] if i else 1}
    return value


@pytest.mark.parametrize("depth", [0, 1, 2, MAX_DEPTH - 1, MAX_DEPTH])
def test_what_is_nested_no_deeper_than_allowed_is_let_through(depth: int) -> None:
    check_depth("f", nested(depth))


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 5000, 100_000])
def test_what_is_nested_deeper_is_refused_by_its_field(depth: int) -> None:
    for check in (check_depth, schema_for_grammar):
        with pytest.raises(InvalidRequestError, match=r"^f: it is nested too deeply, at"):
            check("f", nested(depth))
