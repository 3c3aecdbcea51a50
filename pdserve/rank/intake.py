"""What another process asks a node to compute, checked before anything is spent on it.

The router has checked the client's input; here a node guards its ranks, which one wrong number
would end together with every request they hold.
"""

from collections.abc import Iterable, Sequence
from math import isfinite

from pdserve.core.errors import InvalidRequestError
from pdserve.core.model_spec import ModelSpec
from pdserve.core.request import SamplingParams

MAX_PROMPT_LOGPROBS = 20  # the likeliest tokens of each; a step's output may have thousands


def check_work(
    model: ModelSpec,
    *,
    token_ids: Sequence[int],
    prompt_len: int,
    choices: Sequence[int],
    sampling: SamplingParams,
) -> None:
    """Raise InvalidRequestError naming the first field that no rank could work with."""
    _check_token_ids("token_ids", token_ids, model)
    if not 1 <= prompt_len <= len(token_ids):
        raise InvalidRequestError(
            "prompt_len", f"got {prompt_len}, allowed are 1 to {len(token_ids)}, the tokens given"
        )
    if not choices or len(set(choices)) < len(choices):
        raise InvalidRequestError("choices", f"got {list(choices)[:20]}, one of each is wanted")
    _check_sampling(sampling, model)


def check_token_mask(mask: bytes, model: ModelSpec) -> None:
    """Raise InvalidRequestError for a mask that is none of this model's, or that leaves nothing."""
    wanted = -(-model.vocab_size // 8)
    if len(mask) != wanted:
        raise InvalidRequestError("token_mask", f"got {len(mask)} bytes, {wanted} are wanted")
    if not int.from_bytes(mask, "little") & ((1 << model.vocab_size) - 1):
        raise InvalidRequestError("token_mask", "it allows no token")


def end_token_ids(model: ModelSpec, sampling: SamplingParams) -> tuple[int, ...]:
    """The tokens that end a sequence."""
    ends = () if sampling.ignore_eos else model.eos_token_ids
    return (*ends, *sampling.stop_token_ids)


def _check_sampling(sampling: SamplingParams, model: ModelSpec) -> None:
    _check_between("max_tokens", sampling.max_tokens, 1, None)
    _check_between("seed", sampling.seed, 0, 2**63 - 1)
    if sampling.top_k is not None:
        _check_between("top_k", sampling.top_k, 1, None)
    if sampling.logprobs is not None:
        _check_between("logprobs", sampling.logprobs, 0, model.vocab_size)
    if sampling.prompt_logprobs is not None:
        _check_between("prompt_logprobs", sampling.prompt_logprobs, 0, MAX_PROMPT_LOGPROBS)
    _check_finite("temperature", sampling.temperature)
    _check_finite("top_p", sampling.top_p)
    _check_finite("min_p", sampling.min_p)
    _check_finite("presence_penalty", sampling.presence_penalty)
    _check_finite("frequency_penalty", sampling.frequency_penalty)
    _check_finite("repetition_penalty", sampling.repetition_penalty)
    if sampling.stop_token_ids:
        _check_token_ids("stop_token_ids", sampling.stop_token_ids, model)
    if sampling.logit_bias:
        _check_token_ids("logit_bias", [token_id for token_id, _ in sampling.logit_bias], model)
        for _, bias in sampling.logit_bias:
            _check_finite("logit_bias", bias)


def _check_token_ids(field: str, token_ids: Sequence[int], model: ModelSpec) -> None:
    if not token_ids:
        raise InvalidRequestError(field, "got none, at least one is wanted")
    wrong = _first_outside(token_ids, model.vocab_size)
    if wrong is not None:
        raise InvalidRequestError(
            field, f"got {wrong}, the model's token ids are 0 to {model.vocab_size - 1}"
        )


def _first_outside(token_ids: Iterable[int], vocab_size: int) -> int | None:
    return next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)


def _check_between(field: str, value: int, low: int, high: int | None) -> None:
    if value < low or (high is not None and value > high):
        allowed = f"{low} and more" if high is None else f"{low} to {high}"
        raise InvalidRequestError(field, f"got {value}, allowed are {allowed}")


def _check_finite(field: str, value: float) -> None:
    if not isfinite(value):
        raise InvalidRequestError(field, f"got {value}, a finite number is wanted")
