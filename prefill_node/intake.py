"""What decode nodes ask for, checked and in the engine's words."""

from math import gcd

from kv_transfer.handoff import SenderHandoff
from pdserve.core.errors import InvalidRequestError, NeverFitsError
from pdserve.core.kv_layout import KvLayout
from pdserve.core.node import NodeSpec
from pdserve.engine.constraint import FirstTokenMask
from pdserve.engine.sequence import Sequence
from pdserve.rank.intake import check_token_mask, check_work, end_token_ids
from pdserve.rpc import convert
from pdserve.rpc.v1 import session_pb2


def make_sequence(
    task: session_pb2.PrefillTask, spec: NodeSpec, *, max_model_len: int, arrived_s: float
) -> Sequence:
    """The prompt to be computed. Raises InvalidRequestError if it could not be here."""
    sampling = convert.sampling_from_proto(task.sampling)
    token_ids = list(task.token_ids)
    check_work(
        spec.model,
        token_ids=token_ids,
        prompt_len=task.prompt_len,
        choices=task.choices,
        sampling=sampling,
    )
    if task.token_mask:
        check_token_mask(task.token_mask, spec.model)
    num_tokens = len(token_ids)
    if num_tokens > max_model_len:
        problem = f"{num_tokens} tokens; {spec.name} takes up to {max_model_len}"
        raise NeverFitsError("prompt", problem)
    return Sequence(
        key=convert.handoff_from_proto(task.handoff).key,
        choices=tuple(task.choices),
        sampling=sampling,
        prompt_len=task.prompt_len,
        token_ids=token_ids,
        end_token_ids=end_token_ids(spec.model, sampling),
        max_len=num_tokens + 1,
        arrived_s=arrived_s,
        cache_salt=task.cache_salt,
        is_cacheable=sampling.prompt_logprobs is None,  # every row of the prompt is looked at
        lane=task.lane,
        constraint=FirstTokenMask(task.token_mask) if task.token_mask else None,
    )


def make_sender(task: session_pb2.PrefillTask, own: KvLayout, theirs: KvLayout) -> SenderHandoff:
    """Its handoff, of what the decode node has not. Raises InvalidRequestError."""
    num_prompt = len(task.token_ids)
    if task.start % theirs.block_size or task.start >= num_prompt:
        raise InvalidRequestError(
            "start",
            f"got {task.start}, allowed are multiples of {theirs.block_size} below {num_prompt}",
        )
    unit = gcd(own.block_size, theirs.block_size)
    return SenderHandoff(num_ranks=own.tp_size, unit=unit, start=task.start)
