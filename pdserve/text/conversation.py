"""The messages of a conversation as chat templates want them, tool calls and their results too.

A template that knows tools gets them as Hugging Face's libraries write them. For one that does not,
tools are described to the model, and calls and results written, in Hermes' own words.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.core.errors import InvalidRequestError
from pdserve.text.nesting import TOO_DEEP, check_depth
from pdserve.text.tools import TOOL_FORMATS, Tool, ToolCall, described

_HERMES = TOOL_FORMATS["hermes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a conversation. ``tool_call_id``: the call that a tool's message answers."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """For a template that knows tools. Raises InvalidRequestError for arguments that are no JSON
    object.
    """
    return [_as_known(i, message) for i, message in enumerate(messages)]


def plain_messages(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """For a template that knows none. Raises InvalidRequestError as ``template_messages``."""
    plain = list(_as_text(messages))
    if not tools:
        return plain
    if plain and plain[0]["role"] == "system":
        first = plain.pop(0)["content"]
        return [{"role": "system", "content": f"{first}\n\n{described(tools)}"}, *plain]
    return [{"role": "system", "content": described(tools)}, *plain]


def _as_known(index: int, message: ChatMessage) -> dict[str, Any]:
    known: dict[str, Any] = {"role": _role(message.role), "content": message.content}
    if message.tool_calls:
        known["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(index, i, call)},
            }
            for i, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None:
        known["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        known["name"] = message.name
    return known


def _as_text(messages: Sequence[ChatMessage]) -> Iterator[dict[str, Any]]:
    results: list[str] = []
    for index, message in enumerate(messages):
        if message.role == "tool":
            results.append(f"<tool_response>\n{message.content}\n</tool_response>")
            continue
        if results:
            yield {"role": "user", "content": "\n".join(results)}
            results = []
        calls = [
            f"{_HERMES.opener}\n{_HERMES.write(call.name, _arguments(index, i, call))}\n"
            f"{_HERMES.closer}"
            for i, call in enumerate(message.tool_calls)
        ]
        said = [message.content] if message.content or not calls else []
        yield {"role": _role(message.role), "content": "\n".join((*said, *calls))}
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _arguments(index: int, i: int, call: ToolCall) -> Mapping[str, Any]:
    field = f"messages[{index}].tool_calls[{i}].function.arguments"
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError as error:
        raise InvalidRequestError(field, f"it is no JSON: {error}") from None
    except RecursionError:
        raise InvalidRequestError(field, TOO_DEEP) from None
    if not isinstance(arguments, dict):
        raise InvalidRequestError(field, "a JSON object is wanted")
    check_depth(field, arguments)
    return arguments


def _role(role: str) -> str:
    # Templates of open models do not know the newer name of the system role.
    return "system" if role == "developer" else role
