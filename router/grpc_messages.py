"""Public gRPC messages to and from what the router works with. Plain copies; unset stays unset."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pdserve.core.errors import InvalidRequestError
from pdserve.core.node import Role
from pdserve.core.request import PromptLogprob, TokenLogprobs
from pdserve.rpc.convert import timeline_to_proto
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.text.conversation import ChatMessage
from pdserve.text.tokenizer import Tokenizer
from router.body_counts import MAX_MESSAGES, MAX_VALUES
from router.choice_text import Delta
from router.generation import Generation
from router.intake import Conversation
from router.nodes import NodeView
from router.structured_output import MAX_CHOICES, grammar_of, json_schema
from router.tool_use import (
    MAX_CALLS,
    MAX_PARAMETERS_BYTES,
    MAX_TOOLS,
    WORDS,
    ToolUse,
    tool_calls,
    tool_use,
)
from router.validation import (
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingFields,
    wrong_count,
)

PROMPT_TOKENS_A_MESSAGE = 1024  # with 20 of the likeliest each they are half a megabyte


def sampling_fields(message: pb.SamplingParams, max_grammar_bytes: int) -> SamplingFields:
    """A field that is not set keeps its default, which is not zero."""
    _check_entries("logit_bias", len(message.logit_bias), MAX_LOGIT_BIAS_ENTRIES)
    _check_entries("stop", len(message.stop), MAX_STOP_STRINGS)
    _check_entries("stop_token_ids", len(message.stop_token_ids), MAX_STOP_TOKEN_IDS)
    _check_entries("choice", len(message.choice), MAX_CHOICES)
    given = {field.name for field, _ in message.ListFields()}
    return SamplingFields(
        max_tokens=message.max_tokens if "max_tokens" in given else None,
        min_tokens=message.min_tokens if "min_tokens" in given else None,
        temperature=message.temperature if "temperature" in given else None,
        top_p=message.top_p if "top_p" in given else None,
        top_k=message.top_k if "top_k" in given else None,
        min_p=message.min_p if "min_p" in given else None,
        presence_penalty=message.presence_penalty if "presence_penalty" in given else None,
        frequency_penalty=message.frequency_penalty if "frequency_penalty" in given else None,
        repetition_penalty=message.repetition_penalty if "repetition_penalty" in given else None,
        logit_bias=dict(message.logit_bias),
        seed=message.seed if "seed" in given else None,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if "logprobs" in given else None,
        n=message.n if "n" in given else None,
        best_of=message.best_of if "best_of" in given else None,
        prompt_logprobs=message.prompt_logprobs if "prompt_logprobs" in given else None,
        skip_special_tokens=message.skip_special_tokens if "skip_special_tokens" in given else None,
        include_stop_str_in_output=message.include_stop_str_in_output,
        grammar=grammar_of(
            {
                "json_schema": message.json_schema if "json_schema" in given else None,
                "json_object": True if message.json_object else None,
                "regex": message.regex if "regex" in given else None,
                "grammar": message.grammar if "grammar" in given else None,
                "choice": list(message.choice) or None,
            },
            max_grammar_bytes,
        ),
    )


def request_fields(request: pb.GenerateRequest, max_grammar_bytes: int) -> SamplingFields:
    """The sampling fields, and what stands beside them."""
    return replace(
        sampling_fields(request.sampling, max_grammar_bytes),
        cache_salt=request.cache_salt if request.HasField("cache_salt") else None,
        ttft_slo_ms=request.ttft_slo_ms if request.HasField("ttft_slo_ms") else None,
        tpot_slo_ms=request.tpot_slo_ms if request.HasField("tpot_slo_ms") else None,
    )


def prompt_of(request: pb.GenerateRequest) -> str | list[int] | Conversation:
    """Raises InvalidRequestError where the request has no prompt."""
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            _check_entries("prompt", len(request.token_ids.ids), MAX_VALUES)
            return list(request.token_ids.ids)
        case "chat":
            return conversation(request.chat, bool(request.add_special_tokens))
        case _:
            raise InvalidRequestError("prompt", "give one of text, token_ids and chat")


def conversation(chat: pb.ChatMessages, add_special_tokens: bool) -> Conversation:
    """Raises InvalidRequestError, for counts before anything is copied."""
    _check_entries("messages", len(chat.messages), MAX_MESSAGES)
    _check_entries("tools", len(chat.tools), MAX_TOOLS)
    return Conversation(
        messages=[_message(item, f"messages[{i}]") for i, item in enumerate(chat.messages)],
        add_special_tokens=add_special_tokens,
        tool_use=_tool_use(chat),
    )


def _check_entries(field: str, count: int, most: int) -> None:
    if count > most:
        raise wrong_count(field, count, most)


def _message(item: pb.ChatMessage, where: str) -> ChatMessage:
    _check_entries(f"{where}.tool_calls", len(item.tool_calls), MAX_CALLS)
    calls = [
        {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in item.tool_calls
    ]
    return ChatMessage(
        role=item.role,
        content=item.content,
        tool_calls=tool_calls(f"{where}.tool_calls", calls),
        tool_call_id=item.tool_call_id if item.HasField("tool_call_id") else None,
    )


def _tool_use(chat: pb.ChatMessages) -> ToolUse | None:
    """Raises InvalidRequestError naming the tool that is none."""
    size = sum(len(tool.parameters.encode()) for tool in chat.tools)
    if size > MAX_PARAMETERS_BYTES:
        problem = f"got {size} bytes of parameters, at most {MAX_PARAMETERS_BYTES} are allowed"
        raise InvalidRequestError("tools", problem)
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description if tool.HasField("description") else None,
                "parameters": _parameters(tool.parameters, f"tools[{i}].parameters"),
            },
        }
        for i, tool in enumerate(chat.tools)
    ]
    choice: object = chat.tool_choice or "auto"
    if choice not in WORDS:
        choice = {"type": "function", "function": {"name": choice}}
    parallel = chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else None
    return tool_use(tools, choice, parallel)


def _parameters(text: str, where: str) -> object:
    return json_schema(where, text, MAX_PARAMETERS_BYTES) if text else None


def delta_message(request_id: str, delta: Delta, tokenizer: Tokenizer) -> pb.GenerateResponse:
    message = pb.GenerateResponse(
        request_id=request_id,
        choice=delta.choice,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=_logprobs(delta, tokenizer),
        finish_reason=delta.finish_reason or "",
    )
    if isinstance(delta.stop_reason, str):
        message.stop_string = delta.stop_reason
    elif delta.stop_reason is not None:
        message.stop_token_id = delta.stop_reason
    return message


def prompt_messages(
    request_id: str,
    prompt_ids: Sequence[int],
    logprobs: Sequence[PromptLogprob],
    tokenizer: Tokenizer,
) -> Iterator[pb.GenerateResponse]:
    """The prompt's tokens with their log-probabilities; the first has none."""
    of_each = (None, *logprobs)
    for at in range(0, len(prompt_ids), PROMPT_TOKENS_A_MESSAGE):
        part = slice(at, at + PROMPT_TOKENS_A_MESSAGE)
        tokens = zip(prompt_ids[part], of_each[part], strict=True)
        yield pb.GenerateResponse(
            request_id=request_id,
            prompt_logprobs=[_prompt_token(*token, tokenizer) for token in tokens],
        )


def last_message(generation: Generation, *, timeline: bool) -> pb.GenerateResponse:
    """Usage and, where asked for, the timeline of a call with one prompt."""
    usage, over = generation.usage, generation.overs[0]
    message = pb.GenerateResponse(
        request_id=generation.request_ids[0],
        usage=pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        ),
    )
    if timeline and over.timeline is not None:
        message.timeline.CopyFrom(timeline_to_proto(over.timeline))
        message.timeline.planned = over.planned or ""
        message.timeline.explain = over.explain
    return message


def node_load(view: NodeView) -> pb.NodeLoad:
    """Zeros where the node has told nothing; then it is not ready either."""
    load = pb.NodeLoad(node=view.name, role=Role(view.role).value, ready=view.ready)
    load.reason = view.reason or ""
    if view.state is not None:
        load.total_blocks = view.state.total_blocks
        load.free_blocks = view.state.free_blocks
        load.running = view.state.running
        load.waiting = view.state.waiting
        load.block_size = view.state.block_size
        load.queued_prefill_tokens = view.state.queued_prefill_tokens
        load.waiting_for_blocks = view.state.waiting_for_blocks
        load.context_tokens = view.state.context_tokens
    return load


def _logprobs(delta: Delta, tokenizer: Tokenizer) -> Iterator[pb.Logprobs]:
    if not delta.logprobs:
        return
    for token_id, item in zip(delta.token_ids, delta.logprobs, strict=True):
        yield pb.Logprobs(
            token_id=token_id,
            token=tokenizer.token_text(token_id),
            logprob=item.logprob,
            top=_top(item, tokenizer),
        )


def _prompt_token(
    token_id: int, item: PromptLogprob | None, tokenizer: Tokenizer
) -> pb.PromptToken:
    token = pb.PromptToken(token_id=token_id, token=tokenizer.token_text(token_id))
    if item is not None:
        token.logprob, token.rank = item.logprob, item.rank
        token.top.extend(_top(item, tokenizer))
    return token


def _top(item: TokenLogprobs | PromptLogprob, tokenizer: Tokenizer) -> list[pb.TopLogprob]:
    return [
        pb.TopLogprob(token_id=top_id, token=tokenizer.token_text(top_id), logprob=logprob)
        for top_id, logprob in item.top
    ]
