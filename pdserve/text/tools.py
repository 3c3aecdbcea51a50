"""Tools that a model may call: their words, and the ways in which models write calls.

    hermes        <tool_call>{"name": …, "arguments": {…}}</tool_call>    Qwen, Hermes, others
    llama3_json   {"name": …, "parameters": {…}}                          Llama 3.1 and later
    mistral       [TOOL_CALLS][{"name": …, "arguments": {…}}]             Mistral

Which one a model writes is told by its chat template. Knows no API.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the client has. ``parameters`` is a JSON schema."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """As chat templates know it."""
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call that a model made. ``arguments`` are JSON, as it wrote them."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How calls are written. ``opener`` and ``closer`` stand around one or several calls."""

    name: str
    opener: str
    closer: str | None  # None: what is no call ends them
    arguments_key: str
    begins_bare: bool  # an answer may begin with a call without its opener
    shows_special: bool  # the opener is a special token, which is else left out of texts
    call_id_prefix: str
    call_id_chars: int

    def write(self, name: str, arguments: object) -> str:
        """One call's JSON."""
        return json.dumps({"name": name, self.arguments_key: arguments}, ensure_ascii=False)


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    each.name: each
    for each in (
        ToolFormat(
            name="hermes",
            opener="<tool_call>",
            closer="</tool_call>",
            arguments_key="arguments",
            begins_bare=False,
            shows_special=False,
            call_id_prefix="call_",
            call_id_chars=24,
        ),
        ToolFormat(
            name="llama3_json",
            opener="<|python_tag|>",
            closer=None,
            arguments_key="parameters",
            begins_bare=True,
            shows_special=True,
            call_id_prefix="call_",
            call_id_chars=24,
        ),
        ToolFormat(
            name="mistral",
            opener="[TOOL_CALLS]",
            closer=None,
            arguments_key="arguments",
            begins_bare=False,
            shows_special=True,
            call_id_prefix="",
            call_id_chars=9,  # its templates want no other
        ),
    )
}
# Looked for in the text of a template, in this order.
_SIGNS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters"', "llama3_json"),
)


def format_of_template(source: str) -> ToolFormat | None:
    """The format that a chat template which knows tools speaks of."""
    for sign, name in _SIGNS:
        if sign in source:
            return TOOL_FORMATS[name]
    return None


def described(tools: Sequence[Tool]) -> str:
    """What a model whose template knows no tools is told: Hermes' own words."""
    listed = "\n".join(json.dumps(tool.as_json(), ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        f"{listed}\n</tools>\n\nFor each function call, return a json object with function name "
        "and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )
