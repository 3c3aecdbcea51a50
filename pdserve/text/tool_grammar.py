"""The grammar of an answer that has to be tool calls, or of one that may be."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.core.request import Grammar, GrammarKind
from pdserve.text.grammar import JSON_LAYOUT
from pdserve.text.schema_for_grammar import schema_for_grammar
from pdserve.text.tools import Tool, ToolFormat

FIELD = "tools"


def calls_grammar(
    tools: Sequence[Tool],
    written: ToolFormat,
    *,
    several: bool,
    or_schema: Mapping[str, Any] | None = None,
) -> Grammar:
    """Calls of these tools as the format writes them, one or ``several``, or JSON of a schema.

    A special token cannot be spelled by a grammar: formats that open with one are written without.
    Raises InvalidRequestError for a schema that no answer can keep to.
    """
    begin, between, end = _around(written)
    calls = f"{begin} call ({between} call)* {end}" if several else f"{begin} call {end}"
    rules = [f"start: {'calls' if or_schema is None else 'calls | answer'}", f"calls: {calls}"]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name)}, "{written.arguments_key}": '
        rules.append(f'call_{i}: {_quoted(head)} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: {_json(tool.parameters)}")
    if or_schema is not None:
        rules.append(f"answer: {_json(or_schema)}")
    return Grammar(kind=GrammarKind.LARK, text="\n".join(rules), field=FIELD)


def _around(written: ToolFormat) -> tuple[str, str, str]:
    """What stands before, between and after calls, as Lark writes it."""
    if written.closer is not None:
        before, after = f"{written.opener}\n", f"\n{written.closer}"
        return _quoted(before), _quoted(f"{after}\n{before}"), _quoted(after)
    if written.begins_bare:
        return "", _quoted("; "), ""
    return _quoted("["), _quoted(", "), _quoted("]")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema_for_grammar(FIELD, schema), "x-guidance": JSON_LAYOUT})
