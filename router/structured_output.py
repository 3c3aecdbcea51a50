"""What a client wants the text of its answer to be, by the names that OpenAI, vLLM and SGLang have
for it: one grammar, or none.

Pure; whether the grammar can be followed is found out elsewhere (``grammar_checks.py``).
"""

import json
from collections.abc import Callable, Mapping, Sequence

from pdserve.core.errors import InvalidRequestError
from pdserve.core.request import Grammar, GrammarKind
from pdserve.text.nesting import check_depth
from router.duplicate_keys import parse_unique
from router.nested_keys import Keys
from router.validation import shown

ANY_OBJECT = '{"type": "object"}'
MAX_CHOICES, MAX_CHOICE_CHARS = 1000, 4096
MAX_SHOWN_NAMES = 200
FORMATS = ("text", "json_object", "json_schema")
_SCHEMA = ("name", "description", "schema", "strict")
RESPONSE_FORMAT_KEYS = Keys(
    known=("type", "json_schema"), inside={"json_schema": Keys(known=_SCHEMA)}
)
TEXT_FORMAT_KEYS = Keys(known=("type", *_SCHEMA))


def grammar_of(fields: Mapping[str, object], max_bytes: int) -> Grammar | None:
    """The one grammar among fields of ``PARSERS`` as they came; None and absent ask for none.

    A JSON text of more than ``max_bytes`` is not parsed, which would hold up all others. Raises
    InvalidRequestError naming the field that is wrong, or that comes beside another.
    """
    found: Grammar | None = None
    for field, value in fields.items():
        grammar = None if value is None else PARSERS[field](field, value, max_bytes)
        if grammar is not None and found is not None:
            raise InvalidRequestError(grammar.field, f"only one of it and {found.field} is allowed")
        found = grammar or found
    return found


def json_schema(field: str, value: object, max_bytes: int) -> dict[str, object]:
    """A JSON schema: an object, or its text. Raises InvalidRequestError naming the field."""
    if isinstance(value, str):
        value = parse_unique(field, value, max_bytes)
    check_depth(field, value)
    if not isinstance(value, dict):
        raise InvalidRequestError(field, f"got {shown(value)}, a JSON schema (an object) is wanted")
    return value


def _json_schema(field: str, value: object, max_bytes: int) -> Grammar:
    text = json.dumps(json_schema(field, value, max_bytes))
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=text, field=field)


def _response_format(field: str, value: object, max_bytes: int) -> Grammar | None:
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Grammar(kind=GrammarKind.JSON_SCHEMA, text=ANY_OBJECT, field=field)
        case {"type": "json_schema", "json_schema": {"schema": schema, **rest}}:
            _check_rest(f"{field}.json_schema", {str(key): item for key, item in rest.items()})
            return _json_schema(f"{field}.json_schema.schema", schema, max_bytes)
        case {"type": "json_schema"}:
            raise InvalidRequestError(f"{field}.json_schema.schema", "it is required")
        case {"type": kind}:
            problem = f"got {shown(kind)}, allowed are {', '.join(FORMATS)}"
            raise InvalidRequestError(f"{field}.type", problem)
        case _:
            raise InvalidRequestError(field, f"got {shown(value)}, an object with type is wanted")


def _text_format(field: str, value: object, max_bytes: int) -> Grammar | None:
    """/v1/responses has the schema beside the type."""
    match value:
        case {"type": "json_schema", "schema": schema, **rest}:
            _check_rest(field, {str(key): item for key, item in rest.items()})
            return _json_schema(f"{field}.schema", schema, max_bytes)
        case {"type": "json_schema"}:
            raise InvalidRequestError(f"{field}.schema", "it is required")
        case _:
            return _response_format(field, value, max_bytes)


def _check_rest(field: str, rest: Mapping[str, object]) -> None:
    """``strict`` or not, the schema is kept to; the others are for people."""
    types = {"name": str, "description": str, "strict": bool}
    for name, value in rest.items():
        if name not in types:
            allowed = ", ".join(("schema", *types))
            raise InvalidRequestError(f"{field}.{name[:50]}", f"unknown; allowed are {allowed}")
        if value is not None and not isinstance(value, types[name]):
            wanted = "a text" if types[name] is str else "true or false"
            raise InvalidRequestError(f"{field}.{name}", f"got {shown(value)}, {wanted} is wanted")


def _structured_outputs(field: str, value: object, max_bytes: int) -> Grammar | None:
    """vLLM's name for all of them."""
    if not isinstance(value, dict):
        raise InvalidRequestError(field, f"got {shown(value)}, an object is wanted")
    given = {name: item for name, item in value.items() if item not in (None, False)}
    if not given:
        return None
    if len(given) > 1:
        names = ", ".join(map(repr, given))[:MAX_SHOWN_NAMES]
        raise InvalidRequestError(field, f"only one of {names} is allowed")
    ((name, item),) = given.items()
    if name not in _OUTPUTS:
        allowed = ", ".join(_OUTPUTS)
        raise InvalidRequestError(f"{field}.{name[:50]}", f"unknown; allowed are {allowed}")
    return _OUTPUTS[name](f"{field}.{name}", item, max_bytes)


def _json_object(field: str, value: object, max_bytes: int) -> Grammar:
    if value is not True:
        raise InvalidRequestError(field, f"got {shown(value)}, true or false is wanted")
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=ANY_OBJECT, field=field)


def _regex(field: str, value: object, max_bytes: int) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, text=_text(field, value), field=field)


def _ebnf(field: str, value: object, max_bytes: int) -> Grammar:
    return Grammar(kind=GrammarKind.EBNF, text=_text(field, value), field=field)


def _text(field: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(field, f"got {shown(value)}, a text is wanted")
    return value


def _choice(field: str, value: object, max_bytes: int) -> Grammar:
    if value == []:
        raise InvalidRequestError(field, "it is empty, a list of texts is wanted")
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InvalidRequestError(field, f"got {shown(value)}, a list of texts is wanted")
    if len(value) > MAX_CHOICES:
        problem = f"got {len(value)} entries, at most {MAX_CHOICES} are allowed"
        raise InvalidRequestError(field, problem)
    for i, text in enumerate(value):
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_CHOICE_CHARS:
            problem = f"got {shown(text)}, texts of 1 to {MAX_CHOICE_CHARS} characters are wanted"
            raise InvalidRequestError(f"{field}[{i}]", problem)
    return Grammar(kind=GrammarKind.LARK, text=lark_choice(value), field=field)


def lark_choice(texts: Sequence[str]) -> str:
    """A grammar of one of these texts."""
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


_OUTPUTS: Mapping[str, Callable[[str, object, int], Grammar | None]] = {
    "json": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
}
PARSERS: Mapping[str, Callable[[str, object, int], Grammar | None]] = {
    "response_format": _response_format,
    "text.format": _text_format,
    "structured_outputs": _structured_outputs,
    "json_object": _json_object,
    "grammar": _ebnf,
    "choice": _choice,
    "guided_json": _json_schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _ebnf,
    "json_schema": _json_schema,
    "regex": _regex,
    "ebnf": _ebnf,
}
