"""From what a client sent to what is dispatched: checked, tokenised, fitted to the context.

The same for HTTP and gRPC. Knows the tokenizer and the limits, no protocol.
"""

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pdserve.core.config import LimitsConfig
from pdserve.core.errors import InvalidRequestError, NeverFitsError, UnknownModelError
from pdserve.core.request import Grammar, GrammarKind
from pdserve.text.chat_template import ChatTemplate
from pdserve.text.conversation import ChatMessage, plain_messages, template_messages
from pdserve.text.tokenizer import Tokenizer
from pdserve.text.tool_grammar import calls_grammar
from pdserve.text.tools import TOOL_FORMATS, ToolFormat, format_of_template
from router.admission import fit_max_tokens
from router.best_of import BestOf
from router.choice_text import TextRules
from router.generation import GenerationRequest
from router.grammar_checks import GrammarChecks
from router.legs import Job
from router.tool_use import CallRules, ToolUse, check_arguments_len
from router.validation import (
    MAX_TOKEN_IDS,
    SamplingFields,
    check_priority,
    check_sampling,
    check_token_ids,
    parse_prompts,
    shown,
    to_sampling_params,
    wrong_count,
)

SEED_BITS = 63
INLINE_IDS = 1 << 15  # of a prompt; more are checked in a thread
INLINE_TOKENS = 4096  # more are made a text in a thread
TIMES_CONTEXT = 4  # a list of more ids than so many contexts is refused by its length
INLINE_CHARS = 4096  # longer texts are tokenised in a thread, so that they hold up nobody else
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What the chat template makes a prompt of."""

    messages: Sequence[ChatMessage]
    add_special_tokens: bool = False  # templates write their own
    add_generation_prompt: bool = True
    template_variables: Mapping[str, object] | None = None
    instructions: str | None = None  # a system's message before the others
    tool_use: ToolUse | None = None
    field: str = "messages"  # what the API calls them


class Intake:
    """Makes GenerationRequests. Every error names the field."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        vocab_size: int,
        served_name: str,
        limits: LimitsConfig,
        grammar_checks: GrammarChecks,
        tool_call_format: str,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._vocab_size = vocab_size
        self._served_name = served_name
        self._limits = limits
        self._grammar_checks = grammar_checks
        self._tool_format = _tool_format(template, tool_call_format)
        self._longest_token = max(len(tokenizer.token_bytes(i)) for i in range(vocab_size))

    def check_model(self, model: str | None) -> None:
        """Raises UnknownModelError; a request that names no model means the served one."""
        if model is not None and model != self._served_name:
            raise UnknownModelError(model, self._served_name)

    def check_text(self, field: str, text: str, max_model_len: int) -> None:
        """Refuse at once what cannot fit, as tokenising megabytes takes seconds."""
        if len(text) > max_model_len * self._longest_token:
            raise NeverFitsError(
                field, f"it has {len(text)} characters; the context holds {max_model_len} tokens"
            )

    def check_conversation(self, conversation: Conversation, max_model_len: int) -> None:
        """``check_text`` of each of its texts, and that its calls' arguments are not too long."""
        field, num_chars = conversation.field, 0
        self.check_text("instructions", conversation.instructions or "", max_model_len)
        for i, message in enumerate(conversation.messages):
            self.check_text(f"{field}[{i}].content", message.content, max_model_len)
            num_chars += sum(len(call.arguments) for call in message.tool_calls)
            check_arguments_len(f"{field}[{i}].tool_calls", num_chars)

    async def completion(
        self,
        prompt: object,
        fields: SamplingFields,
        *,
        add_special_tokens: bool,
        default_max_tokens: int | None,
        max_model_len: int,
        priority: int | None = None,
    ) -> list[GenerationRequest]:
        """One request for each prompt: a text, token ids, or a list of either."""
        rank = check_priority(priority)
        prompts = await self.prompts(
            prompt, max_prompts=self._limits.max_prompts, max_model_len=max_model_len
        )
        check_sampling(fields, vocab_size=self._vocab_size, max_n=self._limits.max_n)
        await self._check_grammar(fields)
        ids = []
        for item in prompts:
            if isinstance(item, str):
                ids.append(await self.tokenize(item, add_special_tokens=add_special_tokens))
            else:
                ids.append(item)
        return [
            _request(item, fields, default_max_tokens, max_model_len, priority=rank) for item in ids
        ]

    async def prompts(
        self, prompt: object, *, max_prompts: int, max_model_len: int
    ) -> list[str | tuple[int, ...]]:
        """Texts and token ids; what is longer than any context is not looked at."""
        _check_num_ids(prompt, TIMES_CONTEXT * max(max_model_len, 1024))
        parse = partial(parse_prompts, prompt, vocab_size=self._vocab_size, max_prompts=max_prompts)
        prompts = await asyncio.to_thread(parse) if _is_long(prompt) else parse()
        for item in prompts:
            if isinstance(item, str):
                self.check_text("prompt", item, max_model_len)
        return prompts

    async def chat(
        self,
        conversation: Conversation,
        fields: SamplingFields,
        *,
        max_model_len: int,
        priority: int | None = None,
    ) -> GenerationRequest:
        """The one request of a conversation."""
        rank = check_priority(priority)
        check_sampling(fields, vocab_size=self._vocab_size, max_n=self._limits.max_n)
        calls, fields = self._calls(conversation.tool_use, fields)
        await self._check_grammar(fields)
        self.check_conversation(conversation, max_model_len)
        ids = await self.tokenize_chat(conversation)
        request = _request(
            ids, fields, None, max_model_len, prompt_field=conversation.field, priority=rank
        )
        return request if calls is None else replace(request, calls=calls)

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """The text's token ids."""
        if len(text) <= INLINE_CHARS:
            return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        ids = await asyncio.to_thread(
            self._tokenizer.encode, text, add_special_tokens=add_special_tokens
        )
        return tuple(ids)

    async def tokenize_chat(self, conversation: Conversation) -> tuple[int, ...]:
        """The conversation's token ids, by the model's chat template."""
        messages, field = list(conversation.messages), conversation.field
        if not messages:
            raise InvalidRequestError(field, "it is empty")
        for i, message in enumerate(messages):
            if message.role not in ROLES:
                problem = f"got {shown(message.role)}, allowed are {', '.join(ROLES)}"
                raise InvalidRequestError(f"{field}[{i}].role", problem)
        if conversation.instructions is not None:
            messages.insert(0, ChatMessage(role="system", content=conversation.instructions))
        tools = () if conversation.tool_use is None else conversation.tool_use.tools
        knows_tools = self._template.with_tools is not None
        text = self._template.render(
            template_messages(messages) if knows_tools else plain_messages(messages, tools),
            add_generation_prompt=conversation.add_generation_prompt,
            tools=[tool.as_json() for tool in tools] if tools and knows_tools else None,
            extra=conversation.template_variables,
        )
        return await self.tokenize(text, add_special_tokens=conversation.add_special_tokens)

    async def detokenize(self, token_ids: Sequence[object], field: str = "tokens") -> str:
        """The text of token ids, special tokens included."""
        if len(token_ids) > MAX_TOKEN_IDS:
            raise wrong_count(field, len(token_ids), MAX_TOKEN_IDS)
        if len(token_ids) <= INLINE_TOKENS:
            return self._decode(field, token_ids)
        return await asyncio.to_thread(self._decode, field, token_ids)

    def _decode(self, field: str, token_ids: Sequence[object]) -> str:
        ids = check_token_ids(field, token_ids, self._vocab_size)
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _calls(
        self, use: ToolUse | None, fields: SamplingFields
    ) -> tuple[CallRules | None, SamplingFields]:
        """How calls are found in the answer, and the fields with what they ask for."""
        if use is None:
            return None, fields
        written = self._tool_format
        if written is None:
            raise InvalidRequestError(
                "tools", "how this model writes calls is unknown: set router.tool_call_format"
            )
        rules = CallRules(
            written=written,
            names=frozenset(tool.name for tool in use.callable_tools),
            forced=use.required,
            most=None if use.parallel else 1,
        )
        if written.shows_special:
            fields = replace(fields, skip_special_tokens=False)
        if use.required or fields.grammar is not None:
            _check_schemas_len(use, fields.grammar, self._limits.max_grammar_bytes)
            fields = replace(fields, grammar=_calls_grammar(use, written, fields.grammar))
        return rules, fields

    async def _check_grammar(self, fields: SamplingFields) -> None:
        if fields.grammar is not None:
            await self._grammar_checks.check(fields.grammar)


def _is_long(prompt: object) -> bool:
    """Whether a look at each id would hold up others."""
    if not isinstance(prompt, list) or not prompt:
        return False
    if isinstance(prompt[0], int):
        return len(prompt) > INLINE_IDS
    inner = sum(len(item) for item in prompt if isinstance(item, list))
    return len(prompt) + inner > INLINE_IDS


def _check_num_ids(prompt: object, most: int) -> None:
    """Refuse a list of more ids than any context, before a look at them."""
    if not isinstance(prompt, list) or not prompt:
        return
    if isinstance(prompt[0], int):
        if len(prompt) > most:
            problem = f"got {len(prompt)} token ids, at most {most} are looked at"
            raise NeverFitsError("prompt", problem)
        return  # what else may be in it is wrong
    for i, item in enumerate(prompt):
        if isinstance(item, list) and len(item) > most:
            problem = f"got {len(item)} token ids, at most {most} are looked at"
            raise NeverFitsError(f"prompt[{i}]", problem)


def _tool_format(template: ChatTemplate, configured: str) -> ToolFormat | None:
    """How the model writes calls; None where its template knows tools and does not tell."""
    if configured != "auto":
        return TOOL_FORMATS[configured]
    if template.with_tools is None:
        return TOOL_FORMATS["hermes"]  # the words in which it is told of its tools
    return format_of_template(template.with_tools)


def _check_schemas_len(use: ToolUse, answer: Grammar | None, max_bytes: int) -> None:
    """Refuse what makes too long a grammar, before a look at each value in it."""
    if answer is not None and len(answer.text) > max_bytes:
        problem = f"got {len(answer.text)} bytes, at most {max_bytes} are allowed"
        raise InvalidRequestError(answer.field, problem)
    size = sum(len(json.dumps(tool.parameters)) for tool in use.callable_tools)
    if size > max_bytes:
        problem = f"got {size} bytes of parameters, at most {max_bytes} are allowed"
        raise InvalidRequestError("tools", problem)


def _calls_grammar(use: ToolUse, written: ToolFormat, answer: Grammar | None) -> Grammar:
    """Calls, or also ``answer`` where none have to be made."""
    schema = None
    if answer is not None:
        if use.required or answer.kind is not GrammarKind.JSON_SCHEMA:
            raise InvalidRequestError(
                answer.field, "beside tools only a JSON schema is allowed, and no tool_choice"
            )
        schema = json.loads(answer.text)
    return calls_grammar(use.callable_tools, written, several=use.parallel, or_schema=schema)


def _request(
    prompt_ids: tuple[int, ...],
    fields: SamplingFields,
    default_max_tokens: int | None,
    max_model_len: int,
    prompt_field: str = "prompt",
    *,
    priority: int,
) -> GenerationRequest:
    if not prompt_ids:
        raise InvalidRequestError(prompt_field, "it has no tokens")
    max_tokens = fit_max_tokens(
        fields,
        prompt_len=len(prompt_ids),
        prompt_field=prompt_field,
        default=default_max_tokens,
        max_model_len=max_model_len,
    )
    sampling = to_sampling_params(fields, max_tokens=max_tokens, seed=secrets.randbits(SEED_BITS))
    best_of = _best_of(fields)
    if best_of is not None and not best_of.show_logprobs:
        sampling = replace(sampling, logprobs=0)  # the sampled tokens', to choose by
    rules = TextRules(
        stop=tuple(fields.stop),
        include_stop_str_in_output=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
        min_tokens=sampling.min_tokens,
        stop_token_ids=frozenset(sampling.stop_token_ids),
    )
    job = Job(
        prompt_ids=prompt_ids,
        sampling=sampling,
        num_choices=fields.best_of or fields.n or 1,
        priority=priority,
        cache_salt=(fields.cache_salt or "").encode(errors="surrogatepass"),
        ttft_slo_ms=fields.ttft_slo_ms,
        tpot_slo_ms=fields.tpot_slo_ms,
        grammar=fields.grammar,
    )
    return GenerationRequest(job=job, rules=rules, best_of=best_of)


def _best_of(fields: SamplingFields) -> BestOf | None:
    num_given = fields.n or 1
    if (fields.best_of or num_given) == num_given:
        return None
    return BestOf(num_given=num_given, show_logprobs=fields.logprobs is not None)
