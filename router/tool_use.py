"""Which tools a request may call, and which it has to: OpenAI's fields, checked.

Pure. How the model writes calls is the model's business (``pdserve/text/tools.py``).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.core.errors import InvalidRequestError
from pdserve.text.nesting import check_depth
from pdserve.text.tools import Tool, ToolCall, ToolFormat
from router.nested_keys import Keys
from router.validation import shown

MAX_TOOLS = 128
MAX_CALLS = 128  # of one message
MAX_PARAMETERS_BYTES = 1 << 20  # of all tools, where they are texts: parsing more holds up others
MAX_ARGUMENTS_CHARS = 1 << 20  # of all calls in a conversation, likewise
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
NO_PARAMETERS: Mapping[str, object] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
WORDS = ("none", "auto", "required")
CHOICES = "none, auto, required or a function by its name"
# A schema, as in ``parameters``, is not looked into.
FUNCTION_KEYS = Keys(known=("name", "description", "parameters", "strict"))
TOOL_KEYS = Keys(
    known=("type", "function", *FUNCTION_KEYS.known),  # of chat's form, and of that of responses
    let_through=("execution", "namespace"),
    inside={"function": FUNCTION_KEYS},
)
CALL_KEYS = Keys(
    known=("id", "type", "function"),
    inside={"function": Keys(known=("name", "arguments"), let_through=("parsed_arguments",))},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """``callable_tools`` are those that may be called: all, or the named one. ``required``: the
    answer has to be calls.
    """

    tools: tuple[Tool, ...]
    callable_tools: tuple[Tool, ...]
    required: bool
    parallel: bool  # several calls in one answer


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """How calls are found in the text of an answer."""

    written: ToolFormat
    names: frozenset[str]
    forced: bool
    most: int | None  # calls that are wanted; None: all


def tool_use(tools: object, choice: object, parallel: bool | None) -> ToolUse | None:
    """What the fields ``tools``, ``tool_choice`` and ``parallel_tool_calls`` ask for; None: no
    calls. Functions have chat's form or, without ``function`` around their fields, that of
    responses. Raises InvalidRequestError naming the field.
    """
    given = _tools(tools)
    if not given:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice", f"got {shown(choice)} without tools")
        return None
    called = _called(given, choice)
    if called is None:
        return None
    return ToolUse(
        tools=given,
        callable_tools=called,
        required=choice not in (None, "auto"),
        parallel=parallel is not False and not isinstance(choice, dict),
    )


def tool_calls(where: str, value: object) -> tuple[ToolCall, ...]:
    """The calls of an assistant's message. Raises InvalidRequestError naming the part."""
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InvalidRequestError(where, f"got {shown(value)}, a list is wanted")
    if len(value) > MAX_CALLS:
        raise InvalidRequestError(where, f"got {len(value)}, at most {MAX_CALLS} are allowed")
    return tuple(_tool_call(f"{where}[{i}]", item) for i, item in enumerate(value))


def check_arguments_len(where: str, num_chars: int) -> None:
    """``num_chars``: of the arguments of all calls up to this one, before any is parsed. Raises
    InvalidRequestError.
    """
    if num_chars > MAX_ARGUMENTS_CHARS:
        problem = (
            f"with it the conversation's calls have {num_chars} characters of arguments, "
            f"at most {MAX_ARGUMENTS_CHARS} are allowed"
        )
        raise InvalidRequestError(where, problem)


def _tool_call(where: str, value: object) -> ToolCall:
    match value:
        case {"id": str(call_id), "function": {"name": str(name), "arguments": str(arguments)}}:
            return ToolCall(call_id=call_id, name=name, arguments=arguments)
        case _:
            raise InvalidRequestError(
                where,
                'a call is {"id": "…", "type": "function", "function": '
                '{"name": "…", "arguments": "…"}}',
            )


def _tools(value: object) -> tuple[Tool, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InvalidRequestError("tools", f"got {shown(value)}, a list is wanted")
    if len(value) > MAX_TOOLS:
        raise InvalidRequestError("tools", f"got {len(value)}, at most {MAX_TOOLS} are allowed")
    tools: dict[str, Tool] = {}
    for i, item in enumerate(value):
        where, name, fields = _function(f"tools[{i}]", item)
        tool = _tool(where, name, fields)
        if tool.name in tools:
            raise InvalidRequestError(f"{where}.name", f"got {tool.name!r} twice")
        tools[tool.name] = tool
    return tuple(tools.values())


def _function(where: str, value: object) -> tuple[str, str, Mapping[object, object]]:
    """Where the fields of a tool's function are, its name and the others."""
    match value:
        case {"type": "function", "function": {"name": str(name), **rest}}:
            return f"{where}.function", name, rest
        case {"type": "function", "name": str(name), **rest} if "function" not in rest:
            return where, name, rest
        case {"type": kind} if kind != "function":
            raise InvalidRequestError(f"{where}.type", f"got {shown(kind)}, allowed is function")
        case _:
            raise InvalidRequestError(
                where, 'a tool is {"type": "function", "function": {"name": "…", …}}'
            )


def _tool(where: str, name: str, rest: Mapping[object, object]) -> Tool:
    if not NAME.fullmatch(name):
        problem = f"got {shown(name)}, allowed are 1 to 64 of a-z, A-Z, 0-9, _, . and -"
        raise InvalidRequestError(f"{where}.name", problem)
    description, parameters = rest.get("description"), rest.get("parameters")
    if description is not None and not isinstance(description, str):
        raise InvalidRequestError(f"{where}.description", "a text is wanted")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequestError(f"{where}.parameters", "a JSON schema (an object) is wanted")
    check_depth(f"{where}.parameters", parameters)
    return Tool(name=name, description=description, parameters=parameters or NO_PARAMETERS)


def _called(tools: tuple[Tool, ...], choice: object) -> tuple[Tool, ...] | None:
    """The tools that may be called; None where none may."""
    match choice:
        case "none":
            return None
        case None | "auto" | "required":
            return tools
        case {"type": "function", "function": {"name": str(name)}}:
            return (_named(tools, name, "tool_choice.function.name"),)
        case {"type": "function", "name": str(name)}:
            return (_named(tools, name, "tool_choice.name"),)
        case _:
            raise InvalidRequestError("tool_choice", f"got {shown(choice)}, allowed are {CHOICES}")


def _named(tools: tuple[Tool, ...], name: str, field: str) -> Tool:
    for tool in tools:
        if tool.name == name:
            return tool
    known = ", ".join(tool.name for tool in tools)[:200]
    raise InvalidRequestError(field, f"got {shown(name)}, the tools are {known}")
