"""The body of /v1/responses, for plain text: types, and what is refused by name.

Values are checked by ``validation.py``, as those of the other routes.
"""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, JsonValue

from pdserve.core.errors import InvalidRequestError
from pdserve.text.conversation import ChatMessage
from router.intake import Conversation
from router.unknown_fields import check_unknown, is_among
from router.validation import SamplingFields, shown

LOGPROBS_INCLUDED = "message.output_text.logprobs"
INCLUDABLE = (LOGPROBS_INCLUDED, "reasoning.encrypted_content")  # the latter: there is none
TEXT_PARTS = ("input_text", "output_text", "text")

# Field -> values that ask for nothing. Any other value is refused by name.
UNSUPPORTED: dict[str, tuple[JsonValue, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({}, {"effort": "none"}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncation": ("disabled",),
}


def _as_message(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _as_parts(value: object) -> object:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class InputPart(_Body):
    type: str
    text: str | None = None


class InputItem(_Body):
    """A message; items of other types are refused by name."""

    type: str = "message"
    role: str | None = None
    content: Annotated[list[InputPart] | None, BeforeValidator(_as_parts)] = None


class TextFormat(_Body):
    type: str = "text"


class TextOptions(_Body):
    format: TextFormat | None = None


class ResponsesBody(_Body):
    """POST /v1/responses."""

    model: str | None = None
    input: Annotated[list[InputItem], BeforeValidator(_as_message)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    stream: bool | None = None
    stream_options: dict[str, JsonValue] | None = None  # its one member asks for padding
    # Not OpenAI's, as in the other routes:
    top_k: int | None = None
    seed: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeline: bool | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS_INCLUDED in (self.include or ()) or bool(self.top_logprobs)

    def check_supported(self) -> None:
        """Raise InvalidRequestError naming the first field that asks for what is not there."""
        extra = self.model_extra or {}
        for field, value in extra.items():
            if value is None or field not in UNSUPPORTED:
                continue
            if not is_among(value, UNSUPPORTED[field]):
                raise InvalidRequestError(field, f"got {shown(value)}: this is not supported")
        check_unknown(extra, type(self).model_fields.keys() | UNSUPPORTED.keys())
        for i, item in enumerate(self.include or ()):
            if item not in INCLUDABLE:
                raise InvalidRequestError(
                    f"include[{i}]", f"got {shown(item)}, allowed are {', '.join(INCLUDABLE)}"
                )
        kind = self.text.format.type if self.text and self.text.format else "text"
        if kind != "text":
            raise InvalidRequestError(
                "text.format.type", f"got {shown(kind)}, only text is supported"
            )

    def conversation(self) -> Conversation:
        """The instructions and the input's messages.

        Raises InvalidRequestError naming the item that is no message of plain text.
        """
        return Conversation(
            messages=[_message(item, f"input[{i}]") for i, item in enumerate(self.input)],
            instructions=self.instructions,
            field="input",
        )

    def sampling_fields(self) -> SamplingFields:
        return SamplingFields(
            max_tokens=self.max_output_tokens,
            max_tokens_field="max_output_tokens",
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            logprobs_field="top_logprobs",
            cache_salt=self.cache_salt,
        )


def _message(item: InputItem, where: str) -> ChatMessage:
    if item.type != "message":
        raise InvalidRequestError(
            f"{where}.type", f"got {shown(item.type)}, only messages are supported"
        )
    if item.role is None:
        raise InvalidRequestError(f"{where}.role", "it is required")
    if item.content is None:
        raise InvalidRequestError(f"{where}.content", "it is required")
    texts = [_text(part, f"{where}.content[{i}]") for i, part in enumerate(item.content)]
    return ChatMessage(role=item.role, content="\n".join(texts))


def _text(part: InputPart, where: str) -> str:
    if part.type not in TEXT_PARTS:
        raise InvalidRequestError(
            f"{where}.type", f"got {shown(part.type)}, allowed are {', '.join(TEXT_PARTS)}"
        )
    if part.text is None:
        raise InvalidRequestError(f"{where}.text", "it is required")
    return part.text
