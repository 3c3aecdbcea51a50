"""The body of /v1/responses: types, and what is refused by name.

Values are checked by ``validation.py``, as those of the other routes.
"""

from functools import partial
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, JsonValue

from pdserve.core.errors import InvalidRequestError
from router.first_fault import FirstFault, text_or_list
from router.intake import Conversation
from router.nested_keys import Keys, check_keys
from router.responses_input import ITEM_KEYS, InputItem, input_messages
from router.structured_output import TEXT_FORMAT_KEYS, grammar_of
from router.tool_use import TOOL_KEYS, tool_use
from router.unknown_fields import check_unknown, is_among
from router.validation import SamplingFields, shown

LOGPROBS_INCLUDED = "message.output_text.logprobs"
INCLUDABLE = (LOGPROBS_INCLUDED, "reasoning.encrypted_content")  # the latter: there is none

# Field -> values that ask for nothing. Any other value is refused by name.
UNSUPPORTED: dict[str, tuple[JsonValue, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({}, {"effort": "none"}),
    "truncation": ("disabled",),
}


def _as_message(value: object) -> object:
    return text_or_list(value, lambda text: {"role": "user", "content": text}, "items")


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class TextOptions(_Body):
    format: JsonValue = None


TEXT_KEYS = Keys(
    known=TextOptions.model_fields.keys(),
    let_through=("verbosity",),
    inside={"format": TEXT_FORMAT_KEYS},
)


class ResponsesBody(_Body):
    """POST /v1/responses."""

    model: str | None = None
    input: Annotated[
        list[InputItem],
        FirstFault(),
        BeforeValidator(_as_message),
        BeforeValidator(partial(check_keys, "input", ITEM_KEYS)),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: Annotated[list[str], FirstFault()] | None = None
    text: Annotated[TextOptions, BeforeValidator(partial(check_keys, "text", TEXT_KEYS))] | None = (
        None
    )
    tools: Annotated[JsonValue, BeforeValidator(partial(check_keys, "tools", TOOL_KEYS))] = None
    tool_choice: JsonValue = None
    parallel_tool_calls: bool | None = None
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

    def conversation(self) -> Conversation:
        """The instructions, the input's items and the tools.

        Raises InvalidRequestError naming what of them is not as it has to be.
        """
        return Conversation(
            messages=input_messages(self.input),
            instructions=self.instructions,
            tool_use=tool_use(self.tools, self.tool_choice, self.parallel_tool_calls),
            field="input",
        )

    def sampling_fields(self, max_grammar_bytes: int) -> SamplingFields:
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
            grammar=grammar_of(
                {"text.format": self.text.format if self.text else None}, max_grammar_bytes
            ),
        )
