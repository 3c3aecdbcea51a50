"""The one place where core types and session messages turn into each other. Values are plain
copies.

Public API messages have their own converter beside the server that speaks them
(``router/grpc_messages.py``), since their defaults are the router's business.
"""

from pdserve.core.breaker import BreakerState, Duty, Trouble
from pdserve.core.cost import DecodeCost, LinkCost, NodeCosts, PrefillCost
from pdserve.core.errors import InvalidRequestError
from pdserve.core.request import (
    FinishReason,
    Grammar,
    GrammarKind,
    HandoffId,
    PromptLogprob,
    PromptOutput,
    Request,
    RequestFailure,
    Route,
    RouteTaken,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)
from pdserve.core.timeline import Stage, Timeline
from pdserve.rpc.v1 import inference_pb2, session_pb2


def sampling_to_proto(sampling: SamplingParams) -> session_pb2.NodeSampling:
    return session_pb2.NodeSampling(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias_ids=[token_id for token_id, _ in sampling.logit_bias],
        logit_bias_values=[bias for _, bias in sampling.logit_bias],
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )


def sampling_from_proto(message: session_pb2.NodeSampling) -> SamplingParams:
    """Raises InvalidRequestError if the parts of a field do not belong together."""
    return SamplingParams(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k if message.HasField("top_k") else None,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=_logit_bias(message),
        seed=message.seed,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
    )


def _logit_bias(message: session_pb2.NodeSampling) -> tuple[tuple[int, float], ...]:
    ids, values = message.logit_bias_ids, message.logit_bias_values
    if len(ids) != len(values):
        raise InvalidRequestError("logit_bias", f"got {len(ids)} token ids, {len(values)} values")
    return tuple(zip(ids, values, strict=True))


def request_to_proto(request: Request) -> session_pb2.NodeRequest:
    route = session_pb2.Route(
        decode_node=request.route.decode_node,
        prefill_nodes=request.route.prefill_nodes,
        local_allowed=request.route.local_allowed,
        lane=request.route.lane,
    )
    return session_pb2.NodeRequest(
        request_id=request.request_id,
        attempt=request.attempt,
        token_ids=request.token_ids,
        prompt_len=request.prompt_len,
        choices=request.choices,
        sampling=sampling_to_proto(request.sampling),
        route=route,
        cache_salt=request.cache_salt,
        traceparent=request.traceparent or "",
        grammar=None if request.grammar is None else grammar_to_proto(request.grammar),
    )


def request_from_proto(message: session_pb2.NodeRequest) -> Request:
    route = Route(
        decode_node=message.route.decode_node,
        prefill_nodes=tuple(message.route.prefill_nodes),
        local_allowed=message.route.local_allowed,
        lane=message.route.lane,
    )
    return Request(
        request_id=message.request_id,
        attempt=message.attempt,
        token_ids=tuple(message.token_ids),
        prompt_len=message.prompt_len,
        choices=tuple(message.choices),
        sampling=sampling_from_proto(message.sampling),
        route=route,
        cache_salt=message.cache_salt,
        traceparent=message.traceparent or None,
        grammar=grammar_from_proto(message.grammar) if message.HasField("grammar") else None,
    )


def grammar_to_proto(grammar: Grammar) -> session_pb2.NodeGrammar:
    return session_pb2.NodeGrammar(kind=grammar.kind, text=grammar.text, field=grammar.field)


def grammar_from_proto(message: session_pb2.NodeGrammar) -> Grammar:
    """Raises InvalidRequestError for a kind that is none."""
    try:
        kind = GrammarKind(message.kind)
    except ValueError:
        problem = f"got the kind {message.kind[:40]!r}, allowed are {', '.join(GrammarKind)}"
        raise InvalidRequestError("grammar", problem) from None
    return Grammar(kind=kind, text=message.text, field=message.field)


def logprobs_to_proto(logprobs: TokenLogprobs) -> session_pb2.TokenLogprobs:
    return session_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def logprobs_from_proto(message: session_pb2.TokenLogprobs) -> TokenLogprobs:
    top = tuple(zip(message.top_ids, message.top_logprobs, strict=True))
    return TokenLogprobs(logprob=message.logprob, top=top)


def prompt_logprob_to_proto(item: PromptLogprob) -> session_pb2.PromptLogprob:
    return session_pb2.PromptLogprob(
        logprob=item.logprob,
        rank=item.rank,
        top_ids=[token_id for token_id, _ in item.top],
        top_logprobs=[logprob for _, logprob in item.top],
    )


def prompt_logprob_from_proto(message: session_pb2.PromptLogprob) -> PromptLogprob:
    """Raises ValueError where the parts of it do not belong together."""
    top = tuple(zip(message.top_ids, message.top_logprobs, strict=True))
    return PromptLogprob(logprob=message.logprob, rank=message.rank, top=top)


def prompt_output_to_proto(output: PromptOutput) -> session_pb2.PromptOutput:
    return session_pb2.PromptOutput(
        request_id=output.request_id,
        attempt=output.attempt,
        index=output.index,
        logprobs=map(prompt_logprob_to_proto, output.logprobs),
    )


def prompt_output_from_proto(message: session_pb2.PromptOutput) -> PromptOutput:
    """Raises ValueError likewise."""
    return PromptOutput(
        request_id=message.request_id,
        attempt=message.attempt,
        index=message.index,
        logprobs=tuple(map(prompt_logprob_from_proto, message.logprobs)),
    )


def fill_output(message: session_pb2.TokenOutput, output: TokenOutput) -> None:
    """Write an output into a message that is empty. Once for each token: a message that is made
    from keywords and then copied into a list takes seven times as long.
    """
    message.request_id = output.request_id
    message.attempt = output.attempt
    message.choice = output.choice
    message.index = output.index
    message.token_ids.extend(output.token_ids)
    if output.logprobs:
        message.logprobs.extend(map(logprobs_to_proto, output.logprobs))
    if output.finish_reason is not None:
        message.finish_reason = output.finish_reason
    if output.stop_token_id is not None:
        message.stop_token_id = output.stop_token_id


def output_from_proto(message: session_pb2.TokenOutput) -> TokenOutput:
    return TokenOutput(
        request_id=message.request_id,
        attempt=message.attempt,
        choice=message.choice,
        index=message.index,
        token_ids=tuple(message.token_ids[:]),  # a slice first: half the time
        logprobs=tuple(map(logprobs_from_proto, message.logprobs)) if message.logprobs else (),
        finish_reason=FinishReason(message.finish_reason) if message.finish_reason else None,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
    )


def failure_to_proto(failure: RequestFailure) -> session_pb2.RequestFailure:
    return session_pb2.RequestFailure(
        request_id=failure.request_id,
        attempt=failure.attempt,
        kind=failure.kind,
        message=failure.message,
        retryable=failure.retryable,
    )


def failure_from_proto(message: session_pb2.RequestFailure) -> RequestFailure:
    return RequestFailure(
        request_id=message.request_id,
        attempt=message.attempt,
        kind=message.kind,
        message=message.message,
        retryable=message.retryable,
    )


def timeline_to_proto(timeline: Timeline) -> inference_pb2.Timeline:
    stages = [
        inference_pb2.Stage(name=stage.name, node=stage.node, duration_s=stage.duration_s)
        for stage in timeline.stages
    ]
    return inference_pb2.Timeline(
        route=timeline.route,
        stages=stages,
        kv_bytes=timeline.kv_bytes,
        transport=timeline.transport or "",
        num_preemptions=timeline.num_preemptions,
        cached_tokens=timeline.cached_tokens,
    )


def timeline_from_proto(message: inference_pb2.Timeline) -> Timeline:
    stages = tuple(
        Stage(name=stage.name, node=stage.node, duration_s=stage.duration_s)
        for stage in message.stages
    )
    return Timeline(
        route=RouteTaken(message.route),
        stages=stages,
        kv_bytes=message.kv_bytes,
        transport=message.transport or None,
        num_preemptions=message.num_preemptions,
        cached_tokens=message.cached_tokens,
    )


def handoff_to_proto(handoff: HandoffId) -> session_pb2.HandoffKey:
    return session_pb2.HandoffKey(
        request_id=handoff.request_id, attempt=handoff.attempt, leg=handoff.leg
    )


def handoff_from_proto(message: session_pb2.HandoffKey) -> HandoffId:
    return HandoffId(message.request_id, message.attempt, message.leg)


def costs_to_proto(costs: NodeCosts) -> session_pb2.NodeCosts:
    message = session_pb2.NodeCosts()
    for cost, field in ((costs.prefill, message.prefill), (costs.decode, message.decode)):
        if cost is not None:
            field.CopyFrom(session_pb2.StepCost(a=cost.a, b=cost.b, c=cost.c))
    if (link := costs.link) is not None:
        message.link.CopyFrom(
            session_pb2.LinkCost(
                latency_s=link.latency_s, s_per_byte=link.s_per_byte, token_bytes=link.token_bytes
            )
        )
    return message


def costs_from_proto(message: session_pb2.NodeCosts) -> NodeCosts:
    prefill, decode, link = message.prefill, message.decode, message.link
    return NodeCosts(
        prefill=PrefillCost(a=prefill.a, b=prefill.b, c=prefill.c)
        if message.HasField("prefill")
        else None,
        decode=DecodeCost(a=decode.a, b=decode.b, c=decode.c)
        if message.HasField("decode")
        else None,
        link=LinkCost(
            latency_s=link.latency_s, s_per_byte=link.s_per_byte, token_bytes=link.token_bytes
        )
        if message.HasField("link")
        else None,
    )


def trouble_to_proto(trouble: Trouble) -> session_pb2.Trouble:
    return session_pb2.Trouble(
        node=trouble.node,
        stage=trouble.stage,
        state=trouble.state,
        reason=trouble.reason,
    )


def trouble_from_proto(message: session_pb2.Trouble) -> Trouble:
    """Raises ValueError for a stage or state that is none."""
    return Trouble(
        node=message.node,
        stage=Duty(message.stage),
        state=BreakerState(message.state),
        reason=message.reason,
    )
