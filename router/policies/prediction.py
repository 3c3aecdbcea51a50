"""How long a request would wait on given nodes, by what they report and what their work costs.

Pure formulas over loads; None wherever a node has not measured what a formula needs. They hold for
the loads of this moment: what arrives later, and lanes in which short prompts overtake, are not in
them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.core.cost import num_steps
from router.policy import DecodeLoad, Loads, PrefillLoad, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way that a request could take; no prefill node: its decode node prefills it.

    ``ttft_s``: from routing to the first token. ``tpot_s``: between its tokens, at first beside
    prompts that the decode node still has to compute then. ``neighbours_s``: the longest step that
    those who decode there get while it is prefilled and decoded. ``transfer_s``: to move its KV
    with nothing else on the link; ``tail_s`` of it is left when the first token is known, and the
    second has to wait for it.
    """

    decode: DecodeLoad
    prefill: PrefillLoad | None
    ttft_s: float | None
    tpot_s: float | None
    neighbours_s: float | None
    transfer_s: float | None = None
    tail_s: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.ttft_s is not None and self.tpot_s is not None

    @property
    def name(self) -> str:
        return (
            self.decode.name if self.prefill is None else f"{self.decode.name}+{self.prefill.name}"
        )


def candidates(prompt: Prompt, loads: Loads) -> Iterator[Candidate]:
    """Every way that is open: each decode node alone, if it takes prompts, and each connected
    pair.
    """
    for decode in loads.decode:
        if decode.prefill_chunk:
            yield predict(prompt, decode, None)
        for prefill in loads.prefill:
            if prefill.name in decode.prefill_nodes:
                yield predict(prompt, decode, prefill)


def predict(prompt: Prompt, decode: DecodeLoad, prefill: PrefillLoad | None) -> Candidate:
    """What the request would see on these nodes."""
    if prefill is None:
        return _predict_local(prompt, decode)
    return _predict_pair(prompt, decode, prefill)


def prefill_wait_s(node: DecodeLoad | PrefillLoad) -> float | None:
    """Until the prompts that wait on a node are computed, nothing running beside them."""
    cost = node.costs.prefill
    return None if cost is None else cost.queue_s(node.queued_tokens, node.prefill_chunk)


def tpot_s(prompt: Prompt, decode: DecodeLoad) -> float | None:
    """A decode step with the request and all that is there."""
    cost = decode.costs.decode
    if cost is None:
        return None
    context_tokens = decode.context_tokens + prompt.num_choices * prompt.num_tokens
    return cost.step_s(decode.num_requests + prompt.num_choices, context_tokens)


def local_compute_s(prompt: Prompt, decode: DecodeLoad) -> float | None:
    """The decode node's time for the prompt itself, without queue and neighbours."""
    cost = decode.costs.prefill
    if cost is None or not decode.prefill_chunk:
        return None
    return cost.prompt_s(
        prompt.uncached_on(decode.name), decode.prefill_chunk, prompt.cached_on(decode.name)
    )


def _predict_local(prompt: Prompt, decode: DecodeLoad) -> Candidate:
    step_s = tpot_s(prompt, decode)
    compute_s, wait_s = local_compute_s(prompt, decode), prefill_wait_s(decode)
    if step_s is None or compute_s is None or wait_s is None:
        return Candidate(decode=decode, prefill=None, ttft_s=None, tpot_s=step_s, neighbours_s=None)
    assert decode.costs.prefill is not None
    assert decode.costs.decode is not None
    length, cached = prompt.uncached_on(decode.name), prompt.cached_on(decode.name)
    beside_s = decode.costs.decode.marginal_s(decode.num_requests, decode.context_tokens)
    steps = num_steps(decode.queued_tokens + length, decode.prefill_chunk)
    chunk = min(decode.prefill_chunk, length)
    longest_s = decode.costs.prefill.chunk_s(chunk, cached + length - chunk) + beside_s
    return Candidate(
        decode=decode,
        prefill=None,
        ttft_s=wait_s + compute_s + steps * beside_s,
        tpot_s=step_s,
        neighbours_s=max(longest_s, step_s) if decode.num_requests else None,
    )


def _predict_pair(prompt: Prompt, decode: DecodeLoad, prefill: PrefillLoad) -> Candidate:
    step_s, wait_s = tpot_s(prompt, decode), prefill_wait_s(prefill)
    cost, link = prefill.costs.prefill, prefill.costs.link
    ttft_s = transfer_s = None
    tail_s = 0.0
    length, cached = prompt.uncached_on(prefill.name), prompt.cached_on(prefill.name)
    moved = prompt.uncached_on(decode.name)
    neighbours_s = step_s if decode.num_requests else None
    if link is not None:
        transfer_s = link.tokens_s(moved)
    if cost is not None and wait_s is not None:
        compute_s = cost.prompt_s(length, prefill.prefill_chunk, cached)
        ttft_s = wait_s + compute_s
        if transfer_s is not None:
            last_chunk = min(prefill.prefill_chunk or length, length, moved)
            tail_s = max(transfer_s * last_chunk / moved, transfer_s - compute_s)
        if step_s is not None and (prefill_wait_s(decode) or 0.0) > ttft_s:
            step_s += _chunk_beside_s(decode)
    return Candidate(
        decode=decode,
        prefill=prefill,
        ttft_s=ttft_s,
        tpot_s=step_s,
        neighbours_s=neighbours_s,
        transfer_s=transfer_s,
        tail_s=tail_s,
    )


def _chunk_beside_s(decode: DecodeLoad) -> float:
    """What a chunk of the prompts that wait on a decode node adds to its steps."""
    cost = decode.costs.prefill
    if cost is None or not decode.prefill_chunk:
        return 0.0
    return cost.marginal_s(min(decode.prefill_chunk, decode.queued_tokens))
