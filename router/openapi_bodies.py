"""The bodies of the HTTP routes as JSON schemas: the types of the pydantic models, with the bounds
that ``validation.py`` keeps, and the fields that are let through without an effect.

What depends on several fields or on the text itself, such as the length of the context, no schema
says: such a body may still be refused.
"""

from collections.abc import Mapping

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from pdserve.core.config import LimitsConfig
from pdserve.core.routing_config import LEAST_SLO_MS, MOST_SLO_MS
from router import validation
from router.admin_http import DrainBody, RoleBody, ScaleBody
from router.body_counts import MAX_ENTRIES, MAX_ENTRIES_OF_MESSAGE
from router.debug_route import RouteBody
from router.intake import ROLES
from router.openai_schema import (
    UNSUPPORTED,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SamplingBody,
    TokenizeBody,
)
from router.openapi_grammars import grammar_shapes
from router.responses_input import ITEMS, TEXT_PARTS
from router.responses_schema import INCLUDABLE, ResponsesBody
from router.responses_schema import UNSUPPORTED as RESPONSES_UNSUPPORTED
from router.tool_use import NAME
from router.unknown_fields import WITHOUT_EFFECT, WITHOUT_EFFECT_IF

Json = dict[str, object]

REF = "#/components/schemas/{model}"
ANYTHING: Json = {}
ROLE: Json = {"enum": list(ROLES)}
NOTHING: Json = {"type": "null"}

OPEN: tuple[type[BaseModel], ...] = (CompletionBody, ChatBody, ResponsesBody)
OTHERS: tuple[type[BaseModel], ...] = (
    TokenizeBody,
    DetokenizeBody,
    RouteBody,
    DrainBody,
    ScaleBody,
    RoleBody,
)


def body_schemas(limits: LimitsConfig, vocab_size: int, served_name: str) -> dict[str, Json]:
    """Every body's schema, and those that they refer to, by name."""
    _, made = models_json_schema(
        [(model, "validation") for model in (*OPEN, *OTHERS)], ref_template=REF
    )
    schemas: dict[str, Json] = made["$defs"]
    shapes = _shapes(limits, vocab_size) | {"model": {"const": served_name}}
    for model in (*OPEN, *OTHERS):
        own = shapes | _own_shapes(model, limits, vocab_size)
        schema = schemas[model.__name__]
        _set_shapes(schema, own)
        if model in OPEN:
            _let_through(schema, _unsupported(model))
    for name in ("MessageBody", "InputItem"):
        _set_shapes(schemas[name], {"content": _content(schemas, name), "role": ROLE})
    _set_shapes(schemas["TextPart"], {"type": {"const": "text"}})
    _set_shapes(schemas["InputItem"], {"output": _content(schemas, "InputItem")})
    _set_shapes(schemas["InputItem"], {"type": {"enum": list(ITEMS)}})
    _set_shapes(schemas["InputPart"], {"type": {"enum": list(TEXT_PARTS)}})
    for model in (*OPEN, *OTHERS):
        _bound_counts(schemas[model.__name__], MAX_ENTRIES)
    for name in ("MessageBody", "InputItem"):
        _bound_counts(schemas[name], MAX_ENTRIES_OF_MESSAGE)
    _one_of(schemas["TokenizeBody"], "prompt", "messages")
    _one_of(schemas["RouteBody"], "prompt_len", "prompt", "messages")
    return schemas


def query_parameters(schemas: Mapping[str, Json]) -> list[Json]:
    """The fields of ``/debug/route`` that a query can hold."""
    properties = _properties(schemas["RouteBody"])
    return [
        {"name": name, "in": "query", "required": False, "schema": properties[name]}
        for name in ("prompt_len", "n", "ttft_slo_ms", "tpot_slo_ms")
    ]


def _shapes(limits: LimitsConfig, vocab_size: int) -> dict[str, Json]:
    """Fields that mean the same in every body."""
    slo = _number(LEAST_SLO_MS, MOST_SLO_MS)
    penalty = _number(-2.0, 2.0)
    bias = _number(-validation.MAX_LOGIT_BIAS, validation.MAX_LOGIT_BIAS)
    return {
        "max_tokens": _integer(1, validation.INT32_MAX),
        "max_completion_tokens": _integer(1, validation.INT32_MAX),
        "max_output_tokens": _integer(1, validation.INT32_MAX),
        "min_tokens": _integer(0, validation.INT32_MAX),
        "temperature": _number(0.0, validation.MAX_TEMPERATURE),
        "top_p": _above_zero(1.0),
        "top_k": _integer(-1, validation.INT32_MAX),
        "min_p": _number(0.0, 1.0),
        "presence_penalty": penalty,
        "frequency_penalty": penalty,
        "repetition_penalty": _above_zero(validation.MAX_REPETITION_PENALTY),
        "logit_bias": {
            "type": "object",
            "maxProperties": validation.MAX_LOGIT_BIAS_ENTRIES,
            "propertyNames": {"pattern": rf"^[0-9]{{1,{validation.MAX_ID_DIGITS}}}$"},
            "additionalProperties": bias,
        },
        "seed": _integer(validation.INT64_MIN, validation.INT64_MAX),
        "n": _integer(1, limits.max_n),
        "best_of": _integer(1, limits.max_n),
        "stop": _one_or_several(
            {"type": "string", "minLength": 1, "maxLength": validation.MAX_STOP_CHARS},
            {"maxItems": validation.MAX_STOP_STRINGS},
        ),
        "stop_token_ids": {
            "type": "array",
            "maxItems": validation.MAX_STOP_TOKEN_IDS,
            "items": _token_id(vocab_size),
        },
        "top_logprobs": _integer(0, validation.MAX_LOGPROBS),
        "prompt_logprobs": _integer(0, validation.MAX_LOGPROBS),
        "priority": _integer(-validation.MAX_PRIORITY, validation.MAX_PRIORITY),
        "ttft_slo_ms": slo,
        "tpot_slo_ms": slo,
        "cache_salt": {"type": "string", "minLength": 1, "maxLength": validation.MAX_SALT_CHARS},
        "tools": {"type": "array", "items": _tool()},
        **grammar_shapes(limits.max_grammar_bytes),
    }


def _own_shapes(model: type[BaseModel], limits: LimitsConfig, vocab_size: int) -> dict[str, Json]:
    """Fields that mean something else elsewhere."""
    token_ids: Json = {"type": "array", "minItems": 1, "items": _token_id(vocab_size)}
    text: Json = {"type": "string", "minLength": 1}
    prompt: Json = {"anyOf": [text, token_ids]}
    several = {"type": "array", "minItems": 1, "maxItems": limits.max_prompts, "items": prompt}
    message: Json = {"$ref": REF.format(model="MessageBody")}
    messages: Json = {"type": "array", "minItems": 1, "items": message}
    if model is CompletionBody:
        return {
            "prompt": {"anyOf": [text, token_ids, several]},
            "logprobs": _integer(0, validation.MAX_LOGPROBS),
        }
    if model is ResponsesBody:
        item: Json = {"$ref": REF.format(model="InputItem")}
        return {
            "input": {
                "anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": item}]
            },
            "include": {"type": "array", "items": {"enum": list(INCLUDABLE)}},
        }
    if model is RouteBody:
        one: Json = {"type": "array", "minItems": 1, "maxItems": 1, "items": prompt}
        return {
            "prompt_len": _integer(1, validation.INT32_MAX),
            "prompt": {"anyOf": [text, token_ids, one]},
            "messages": messages,
        }
    if model is DetokenizeBody:
        most = validation.MAX_TOKEN_IDS
        return {"tokens": {"type": "array", "maxItems": most, "items": _token_id(vocab_size)}}
    return {"messages": messages}


def _set_shapes(schema: Json, shapes: Mapping[str, Json]) -> None:
    """Put each shape in its property's place; those that need not be given may be null."""
    properties = _properties(schema)
    required = schema.get("required", [])
    assert isinstance(required, list)
    for name in properties.keys() & shapes.keys():
        shape = shapes[name]
        properties[name] = shape if name in required else {"anyOf": [shape, NOTHING]}


def _bound_counts(schema: Json, most: Mapping[str, int]) -> None:
    """Declare what ``body_counts.py`` says of the entries of lists and objects."""
    properties = _properties(schema)
    for name in properties.keys() & most.keys():
        properties[name] = _bounded(properties[name], most[name])


def _bounded(shape: Json, most: int) -> Json:
    """With a bound on each list and object that it allows, where it has none."""
    branches = shape.get("anyOf")
    if isinstance(branches, list):
        return shape | {"anyOf": [_bounded(branch, most) for branch in branches]}
    kind = shape.get("type", "const" if shape.keys() & {"const", "enum"} else "anything")
    bounds = {
        "array": {"maxItems": most},
        "object": {"maxProperties": most},
        "anything": {"maxItems": most, "maxProperties": most},
    }
    return bounds.get(str(kind), {}) | shape


def _let_through(schema: Json, unsupported: Mapping[str, tuple[object, ...]]) -> None:
    """Declare what ``unknown_fields.py`` says of fields that the model does not have."""
    properties = _properties(schema)
    for name in sorted(WITHOUT_EFFECT - properties.keys()):
        properties[name] = ANYTHING | {"description": "Let through, without an effect."}
    for name, values in (*unsupported.items(), *WITHOUT_EFFECT_IF.items()):
        properties.setdefault(name, {"enum": [None, *values]})
    schema["additionalProperties"] = NOTHING


def _tool() -> Json:
    """A function, in chat's form or in that of responses."""
    name: Json = {"type": "string", "pattern": f"^{NAME.pattern}$"}
    function: Json = {"type": "object", "required": ["name"], "properties": {"name": name}}
    kind: Json = {"const": "function"}
    return {
        "anyOf": [
            {
                "type": "object",
                "required": ["type", "function"],
                "properties": {"type": kind, "function": function},
            },
            {
                "type": "object",
                "required": ["type", "name"],
                "properties": {"type": kind, "name": name},
            },
        ]
    }


def _unsupported(model: type[BaseModel]) -> Mapping[str, tuple[object, ...]]:
    return UNSUPPORTED if issubclass(model, SamplingBody) else RESPONSES_UNSUPPORTED


def _one_of(schema: Json, *names: str) -> None:
    """Exactly one of the properties is given, and is not null."""
    properties = _properties(schema)
    given = {name: _not_null(properties[name]) for name in names}
    schema["anyOf"] = [
        {
            "required": [name],
            "properties": {other: given[name] if other == name else NOTHING for other in names},
        }
        for name in names
    ]


def _content(schemas: Mapping[str, Json], name: str) -> Json:
    """A message's content: a text, or parts of text."""
    part = {"MessageBody": "TextPart", "InputItem": "InputPart"}[name]
    assert part in schemas
    items: Json = {"type": "array", "items": {"$ref": REF.format(model=part)}}
    return {"anyOf": [{"type": "string"}, items]}


def _properties(schema: Json) -> dict[str, Json]:
    properties = schema["properties"]
    assert isinstance(properties, dict)
    return properties


def _not_null(schema: Json) -> Json:
    branches = schema.get("anyOf")
    if not isinstance(branches, list):
        return schema
    (only,) = (branch for branch in branches if branch != NOTHING)
    assert isinstance(only, dict)
    return only


def _integer(low: int, high: int) -> Json:
    return {"type": "integer", "minimum": low, "maximum": high}


def _number(low: float, high: float) -> Json:
    return {"type": "number", "minimum": low, "maximum": high}


def _above_zero(high: float) -> Json:
    return {"type": "number", "exclusiveMinimum": 0, "maximum": high}


def _token_id(vocab_size: int) -> Json:
    return _integer(0, vocab_size - 1)


def _one_or_several(item: Json, bounds: Json) -> Json:
    return {"anyOf": [item, {"type": "array", "items": item, **bounds}]}
