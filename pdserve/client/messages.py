"""What both clients share: requests made of keywords, results made of messages, and errors.

No I/O.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

import grpc

from pdserve.client.results import (
    Choice,
    Chunk,
    Completion,
    ModelInfo,
    NodeLoad,
    PositionLogprobs,
    PromptToken,
    ServerInfo,
    TokenLogprob,
    Usage,
)
from pdserve.core.errors import InternalError, InvalidRequestError, PdserveError
from pdserve.rpc.convert import timeline_from_proto
from pdserve.rpc.failures import error_of
from pdserve.rpc.v1 import inference_pb2 as pb

UNCONNECTED = "failed to connect to all addresses"  # gRPC's words
REFUSED = "Connection refused"

Message = Mapping[str, str]  # {"role": ..., "content": ...}
Prompt = str | Sequence[int] | Sequence[Message]


class SamplingOptions(TypedDict, total=False):
    """How to choose tokens. What is left out has vLLM's default."""

    max_tokens: int  # default: what the context leaves
    min_tokens: int
    temperature: float  # 0: greedy
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    n: int
    prompt_logprobs: int  # 0: those of the prompt's tokens; k: also of the k likeliest
    best_of: int  # make so many answers, give the n likeliest
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    # What the text of the answer has to be; at most one of them.
    json_schema: str
    json_object: bool
    regex: str
    grammar: str  # llguidance's Lark, or llama.cpp's GBNF
    choice: Sequence[str]


class RequestOptions(SamplingOptions, total=False):
    """Sampling, and what else may be said of one request."""

    cache_salt: str  # requests share cached KV only with those of the same


def generate_request(
    prompt: Prompt,
    options: RequestOptions,
    *,
    model: str | None,
    timeline: bool,
    label: str | None,
    priority: int | None,
) -> pb.GenerateRequest:
    """Raises InvalidRequestError naming what cannot be sent, TypeError for an unknown option."""
    request = pb.GenerateRequest(model=model or "", timeline=timeline, label=label)
    if priority is not None:
        with _naming("priority"):
            request.priority = priority
    if isinstance(prompt, str):
        request.text = prompt
    elif all(isinstance(item, int) for item in prompt):
        with _naming("prompt"):
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(item for item in prompt if isinstance(item, int))
    else:
        request.chat.CopyFrom(chat_messages(prompt))
    known = RequestOptions.__annotations__
    given: dict[str, Any] = {**options}
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"unknown option {name!r}; known are {', '.join(known)}")
        with _naming(name):
            if name in SamplingOptions.__annotations__:
                request.sampling.MergeFrom(pb.SamplingParams(**{name: value}))
            else:
                request.MergeFrom(pb.GenerateRequest(**{name: value}))
    return request


def chat_messages(messages: Sequence[object]) -> pb.ChatMessages:
    """Raises InvalidRequestError naming the message that is none."""
    chat = pb.ChatMessages()
    for i, message in enumerate(messages):
        match message:
            case {"role": str(role), "content": str(content)}:
                chat.messages.add(role=role, content=content)
            case _:
                raise InvalidRequestError(
                    f"prompt[{i}]", "expected a mapping with the texts role and content"
                )
    return chat


def chunk_of(message: pb.GenerateResponse) -> Chunk:
    reason: str | int | None = None
    if message.HasField("stop_string"):
        reason = message.stop_string
    elif message.HasField("stop_token_id"):
        reason = message.stop_token_id
    return Chunk(
        request_id=message.request_id,
        choice=message.choice,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(_position(item) for item in message.logprobs),
        finish_reason=message.finish_reason or None,
        stop_reason=reason,
        usage=_usage(message),
        timeline=timeline_from_proto(message.timeline) if message.HasField("timeline") else None,
        prompt_logprobs=tuple(map(_prompt_token, message.prompt_logprobs)),
    )


def completion_of(chunks: Iterable[Chunk]) -> Completion:
    """Joins a whole stream. Raises InternalError where its last message is missing."""
    parts: dict[int, list[Chunk]] = {}
    prompt: list[PromptToken] = []
    for chunk in chunks:
        if chunk.prompt_logprobs:
            prompt += chunk.prompt_logprobs
            continue
        if chunk.usage is not None:
            choices = tuple(_choice(index, parts[index]) for index in sorted(parts))
            return Completion(
                request_id=chunk.request_id,
                choices=choices,
                usage=chunk.usage,
                timeline=chunk.timeline,
                prompt_logprobs=tuple(prompt),
            )
        parts.setdefault(chunk.choice, []).append(chunk)
    raise InternalError("the stream ended without its last message")


def model_info_of(message: pb.GetModelInfoResponse) -> ModelInfo:
    return ModelInfo(
        model=message.model,
        architecture=message.architecture,
        dtype=message.dtype,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        eos_token_ids=tuple(message.eos_token_ids),
        bos_token_id=message.bos_token_id if message.HasField("bos_token_id") else None,
        fingerprint=message.fingerprint,
    )


def server_info_of(message: pb.GetServerInfoResponse) -> ServerInfo:
    return ServerInfo(
        version=message.version,
        ready=message.ready,
        reason=message.reason or None,
        routes=dict(message.routes),
    )


def loads_of(message: pb.GetLoadsResponse) -> tuple[NodeLoad, ...]:
    return tuple(
        NodeLoad(
            node=item.node,
            role=item.role,
            ready=item.ready,
            total_blocks=item.total_blocks,
            free_blocks=item.free_blocks,
            running=item.running,
            waiting=item.waiting,
            block_size=item.block_size,
            queued_prefill_tokens=item.queued_prefill_tokens,
            waiting_for_blocks=item.waiting_for_blocks,
            context_tokens=item.context_tokens,
            reason=item.reason or None,
        )
        for item in message.nodes
    )


def tokenize_request(text: str | Sequence[Message], add_special_tokens: bool) -> pb.TokenizeRequest:
    if isinstance(text, str):
        return pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
    return pb.TokenizeRequest(chat=chat_messages(text))


def detokenize_request(token_ids: Iterable[int]) -> pb.DetokenizeRequest:
    with _naming("token_ids"):
        return pb.DetokenizeRequest(token_ids=token_ids)


@contextmanager
def raising() -> Iterator[None]:
    """gRPC's errors become pdserve's."""
    try:
        yield
    except grpc.RpcError as error:
        raise _error_of(error) from error


def _error_of(error: grpc.RpcError) -> PdserveError:
    assert isinstance(error, (grpc.Call, grpc.aio.AioRpcError)), "a failed call has a status"
    details = error.details() or ""
    if error.code() is grpc.StatusCode.UNAVAILABLE and _may_be_tls(details):
        details += "; where only one side speaks TLS: a client does with ca_file (or tls=True)"
    return error_of(error.code(), details, error.trailing_metadata() or ())


def _may_be_tls(details: str) -> bool:
    """Somebody listens there, and no connection came of it."""
    return details.startswith(UNCONNECTED) and REFUSED not in details


@contextmanager
def _naming(field: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(field, str(error)) from error


def _usage(message: pb.GenerateResponse) -> Usage | None:
    if not message.HasField("usage"):
        return None
    usage = message.usage
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _prompt_token(item: pb.PromptToken) -> PromptToken:
    is_first = not item.HasField("logprob")
    return PromptToken(
        token_id=item.token_id,
        token=item.token,
        logprob=None if is_first else item.logprob,
        rank=None if is_first else item.rank,
        top=tuple(map(_logprob, item.top)),
    )


def _position(item: pb.Logprobs) -> PositionLogprobs:
    return PositionLogprobs(sampled=_logprob(item), top=tuple(_logprob(top) for top in item.top))


def _logprob(item: pb.Logprobs | pb.TopLogprob) -> TokenLogprob:
    return TokenLogprob(token_id=item.token_id, token=item.token, logprob=item.logprob)


def _choice(index: int, parts: Sequence[Chunk]) -> Choice:
    return Choice(
        index=index,
        text="".join(part.text for part in parts),
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        logprobs=tuple(item for part in parts for item in part.logprobs),
        finish_reason=parts[-1].finish_reason,
        stop_reason=parts[-1].stop_reason,
    )
