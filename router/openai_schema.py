"""The bodies of the OpenAI routes: types only. Values are checked by ``validation.py``.

Types are strict: a text is not a number, true is not 1. Fields that are not known here are the
business of ``unknown_fields.py``; those in ``UNSUPPORTED`` are known, and not there.
"""

from dataclasses import replace
from functools import partial
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

from pdserve.core.errors import InvalidRequestError
from pdserve.core.request import Grammar
from pdserve.text.conversation import ChatMessage
from router.first_fault import FirstFault, text_or_list
from router.intake import Conversation
from router.nested_keys import ECHOED_OF_MESSAGES, ECHOED_OF_PARTS, Keys, check_keys
from router.structured_output import RESPONSE_FORMAT_KEYS, grammar_of
from router.tool_use import CALL_KEYS, TOOL_KEYS, tool_calls, tool_use
from router.unknown_fields import check_unknown, is_among, nearest, unknown
from router.validation import MAX_TOKEN_IDS, SamplingFields, shown

COMPLETION_MAX_TOKENS = 16  # OpenAI's and vLLM's default for /v1/completions
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")

# Field -> values that ask for nothing. Any other value is refused by name.
UNSUPPORTED: dict[str, tuple[JsonValue, ...]] = {
    "audio": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "reasoning_effort": ("none",),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}


def _as_list(value: object) -> object:
    return text_or_list(value, str, "texts")


def _as_parts(value: object) -> object:
    return text_or_list(value, lambda text: {"type": "text", "text": text}, "parts")


class _Body(BaseModel):
    """Settings of all bodies."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class StreamOptions(_Body):
    include_usage: bool | None = None


class SamplingBody(_Body):
    """The fields that completions and chat share."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    prompt_logprobs: int | None = None
    stop: Annotated[list[str], FirstFault(), BeforeValidator(_as_list)] | None = None
    stop_token_ids: Annotated[list[int], FirstFault()] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    ttft_slo_ms: float | None = None
    cache_salt: str | None = None
    tpot_slo_ms: float | None = None
    timeline: bool | None = None
    priority: int | None = None
    response_format: Annotated[
        JsonValue, BeforeValidator(partial(check_keys, "response_format", RESPONSE_FORMAT_KEYS))
    ] = None
    structured_outputs: JsonValue = None
    guided_json: JsonValue = None
    guided_regex: JsonValue = None
    guided_choice: JsonValue = None
    guided_grammar: JsonValue = None
    json_schema: JsonValue = None
    regex: JsonValue = None
    ebnf: JsonValue = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def grammar(self, max_bytes: int) -> Grammar | None:
        """What the text of the answer has to be."""
        return grammar_of(
            {
                "response_format": self.response_format,
                "structured_outputs": self.structured_outputs,
                "guided_json": self.guided_json,
                "guided_regex": self.guided_regex,
                "guided_choice": self.guided_choice,
                "guided_grammar": self.guided_grammar,
                "json_schema": self.json_schema,
                "regex": self.regex,
                "ebnf": self.ebnf,
            },
            max_bytes,
        )

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check_supported(self) -> None:
        """Raise InvalidRequestError naming the first field that asks for what is not there."""
        for field, value in (self.model_extra or {}).items():
            if value is None or field not in UNSUPPORTED:
                continue
            if not is_among(value, UNSUPPORTED[field]):
                raise InvalidRequestError(field, f"got {shown(value)}: this is not supported")
        check_unknown(self.model_extra or {}, type(self).model_fields.keys() | UNSUPPORTED.keys())
        if self.stream and (self.best_of or 1) > (self.n or 1):
            raise InvalidRequestError("best_of", "more than n is allowed only without stream")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options", "it is allowed only with stream: true")
        for name, value in (
            (self.stream_options and self.stream_options.model_extra) or {}
        ).items():
            if value is not None and name not in STREAM_OPTIONS:
                raise unknown("stream_options", name, nearest(name, STREAM_OPTIONS))


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: object  # parsed JSON; what it has to be is looked at once, in ``validation.py``
    echo: bool | None = None
    logprobs: int | None = None

    def sampling_fields(self, max_grammar_bytes: int) -> SamplingFields:
        fields = _sampling_fields(
            self,
            max_tokens=self.max_tokens,
            max_tokens_field="max_tokens",
            logprobs=self.logprobs,
            grammar=self.grammar(max_grammar_bytes),
        )
        if not self.echo or self.logprobs is None:
            return fields
        # What is echoed has log-probabilities too; with both asked for, each shows its own number.
        return replace(fields, prompt_logprobs=max(self.logprobs, self.prompt_logprobs or 0))


class TextPart(_Body):
    type: str
    text: str | None = None


class MessageBody(_Body):
    role: str
    content: Annotated[list[TextPart], FirstFault(), BeforeValidator(_as_parts)] | None = None
    name: str | None = None
    tool_calls: JsonValue = None
    tool_call_id: str | None = None


MESSAGE_KEYS = Keys(
    known=MessageBody.model_fields.keys(),
    let_through=ECHOED_OF_MESSAGES,
    inside={
        "content": Keys(known=TextPart.model_fields.keys(), let_through=ECHOED_OF_PARTS),
        "tool_calls": CALL_KEYS,
    },
)
Messages = Annotated[
    list[MessageBody],
    FirstFault(),
    BeforeValidator(partial(check_keys, "messages", MESSAGE_KEYS)),
]


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    tools: Annotated[JsonValue, BeforeValidator(partial(check_keys, "tools", TOOL_KEYS))] = None
    tool_choice: JsonValue = None
    parallel_tool_calls: bool | None = None

    def check_supported(self) -> None:
        super().check_supported()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs", "it is allowed only with logprobs: true")
        older, newer = self.max_tokens, self.max_completion_tokens
        if older is not None and newer is not None and older != newer:
            problem = f"got {shown(newer)}, and max_tokens {shown(older)}: allowed is one of them"
            raise InvalidRequestError("max_completion_tokens", f"{problem}, or both the same")

    def conversation(self) -> Conversation:
        return Conversation(
            messages=chat_messages(self.messages),
            add_special_tokens=bool(self.add_special_tokens),
            add_generation_prompt=self.add_generation_prompt is not False,
            template_variables=self.chat_template_kwargs,
            tool_use=tool_use(self.tools, self.tool_choice, self.parallel_tool_calls),
        )

    def sampling_fields(self, max_grammar_bytes: int) -> SamplingFields:
        newer = self.max_completion_tokens is not None
        return _sampling_fields(
            self,
            max_tokens=self.max_completion_tokens if newer else self.max_tokens,
            max_tokens_field="max_completion_tokens" if newer else "max_tokens",
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            grammar=self.grammar(max_grammar_bytes),
        )


class TokenizeBody(_Body):
    """POST /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], FirstFault()] = Field(max_length=MAX_TOKEN_IDS)


def chat_messages(messages: list[MessageBody]) -> list[ChatMessage]:
    """Messages as plain text. Raises InvalidRequestError naming the part that is none."""
    return [_chat_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _chat_message(message: MessageBody, where: str) -> ChatMessage:
    if (message.model_extra or {}).get("function_call"):
        raise InvalidRequestError(f"{where}.function_call", "use tool_calls")
    calls = tool_calls(f"{where}.tool_calls", message.tool_calls)
    if calls and message.role != "assistant":
        raise InvalidRequestError(f"{where}.tool_calls", "only the assistant makes calls")
    return ChatMessage(
        role=message.role,
        content=_text_of(message, where, may_be_none=bool(calls)),
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _text_of(message: MessageBody, where: str, *, may_be_none: bool) -> str:
    if message.content is None:
        if may_be_none:
            return ""
        raise InvalidRequestError(f"{where}.content", "it is required")
    texts = []
    for i, part in enumerate(message.content):
        if part.type != "text":
            raise InvalidRequestError(
                f"{where}.content[{i}].type", f"got {shown(part.type)}, only text is supported"
            )
        if part.text is None:
            raise InvalidRequestError(f"{where}.content[{i}].text", "it is required")
        texts.append(part.text)
    return "\n".join(texts)


def _sampling_fields(
    body: SamplingBody,
    *,
    max_tokens: int | None,
    max_tokens_field: str,
    logprobs: int | None,
    grammar: Grammar | None,
) -> SamplingFields:
    return SamplingFields(
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        seed=body.seed,
        stop=body.stop or (),
        stop_token_ids=body.stop_token_ids or (),
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        logprobs_field="top_logprobs" if isinstance(body, ChatBody) else "logprobs",
        n=body.n,
        best_of=body.best_of,
        prompt_logprobs=body.prompt_logprobs,
        skip_special_tokens=body.skip_special_tokens,
        include_stop_str_in_output=body.include_stop_str_in_output,
        ttft_slo_ms=body.ttft_slo_ms,
        cache_salt=body.cache_salt,
        tpot_slo_ms=body.tpot_slo_ms,
        grammar=grammar,
    )
