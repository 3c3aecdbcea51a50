"""The fields that ask for a grammar (``structured_output.py``) as JSON schemas."""

from router.structured_output import MAX_CHOICE_CHARS, MAX_CHOICES

Json = dict[str, object]


def grammar_shapes(max_bytes: int) -> dict[str, Json]:
    """By field. A text of so many bytes has no more characters than that."""
    text: Json = {"type": "string", "minLength": 1, "maxLength": max_bytes}
    schema: Json = {"anyOf": [{"type": "object"}, {"type": "string", "maxLength": max_bytes}]}
    choice: Json = {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_CHOICES,
        "items": {"type": "string", "minLength": 1, "maxLength": MAX_CHOICE_CHARS},
    }
    outputs: dict[str, Json] = {
        "json": schema,
        "json_object": {"const": True},
        "regex": text,
        "choice": choice,
        "grammar": text,
    }
    nothing: Json = {"enum": [None, False]}
    return {
        "structured_outputs": {
            "type": "object",
            "properties": {name: {"anyOf": [shape, nothing]} for name, shape in outputs.items()},
            "additionalProperties": nothing,
        },
        "guided_json": schema,
        "guided_regex": text,
        "guided_choice": choice,
        "guided_grammar": text,
        "json_schema": schema,
        "regex": text,
        "ebnf": text,
    }
