"""The items of ``input`` of /v1/responses: messages, the model's calls, and their results."""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict

from pdserve.core.errors import InvalidRequestError
from pdserve.text.conversation import ChatMessage
from pdserve.text.nesting import TOO_DEEP, check_depth
from pdserve.text.tools import ToolCall
from router.first_fault import FirstFault, text_or_list
from router.nested_keys import ECHOED_OF_MESSAGES, ECHOED_OF_PARTS, Keys
from router.tool_use import check_arguments_len
from router.validation import shown

ITEMS = ("message", "function_call", "function_call_output")
TEXT_PARTS = ("input_text", "output_text", "text")


def _as_parts(value: object) -> object:
    return text_or_list(value, lambda text: {"type": "input_text", "text": text}, "parts")


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class InputPart(_Body):
    type: str
    text: str | None = None


Parts = Annotated[list[InputPart], FirstFault(), BeforeValidator(_as_parts)] | None


class InputItem(_Body):
    """One of ``ITEMS``; items of other types are refused by name."""

    type: str | None = None  # None: a message
    role: str | None = None
    content: Parts = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Parts = None


PART_KEYS = Keys(known=InputPart.model_fields.keys(), let_through=ECHOED_OF_PARTS)
ITEM_KEYS = Keys(
    known=InputItem.model_fields.keys(),
    let_through=ECHOED_OF_MESSAGES,
    inside={"content": PART_KEYS, "output": PART_KEYS},
)


def input_messages(items: Iterable[InputItem]) -> list[ChatMessage]:
    """The conversation; calls belong to the assistant's message before them.

    Raises InvalidRequestError naming the part of an item that is not as it has to be.
    """
    messages: list[ChatMessage] = []
    num_chars = 0  # of the arguments of calls
    for i, item in enumerate(items):
        where = f"input[{i}]"
        match item.type:
            case "message" | None:
                role = _given(where, "role", item.role)
                content = _text(f"{where}.content", item.content)
                messages.append(ChatMessage(role=role, content=content))
            case "function_call":
                if not messages or messages[-1].role != "assistant":
                    messages.append(ChatMessage(role="assistant", content=""))
                num_chars += len(item.arguments or "")
                check_arguments_len(f"{where}.arguments", num_chars)
                calls = (*messages[-1].tool_calls, _call(where, item))
                messages[-1] = replace(messages[-1], tool_calls=calls)
            case "function_call_output":
                call_id = _given(where, "call_id", item.call_id)
                output = _text(f"{where}.output", item.output)
                messages.append(ChatMessage(role="tool", content=output, tool_call_id=call_id))
            case _:
                raise InvalidRequestError(
                    f"{where}.type", f"got {shown(item.type)}, allowed are {', '.join(ITEMS)}"
                )
    return messages


def _call(where: str, item: InputItem) -> ToolCall:
    arguments = _given(where, "arguments", item.arguments)
    field = f"{where}.arguments"
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        value = None
    except RecursionError:
        raise InvalidRequestError(field, TOO_DEEP) from None
    if not isinstance(value, dict):
        raise InvalidRequestError(field, "a JSON object is wanted, as a text")
    check_depth(field, value)
    return ToolCall(
        call_id=_given(where, "call_id", item.call_id),
        name=_given(where, "name", item.name),
        arguments=arguments,
    )


def _text(where: str, parts: list[InputPart] | None) -> str:
    if parts is None:
        raise InvalidRequestError(where, "it is required")
    return "\n".join(_part_text(f"{where}[{i}]", part) for i, part in enumerate(parts))


def _part_text(where: str, part: InputPart) -> str:
    if part.type not in TEXT_PARTS:
        raise InvalidRequestError(
            f"{where}.type", f"got {shown(part.type)}, only text is supported"
        )
    return _given(where, "text", part.text)


def _given(where: str, field: str, value: str | None) -> str:
    if value is None:
        raise InvalidRequestError(f"{where}.{field}", "it is required")
    return value
