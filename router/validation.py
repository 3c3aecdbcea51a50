"""Checks of what clients send, the same for HTTP and gRPC. Each error names the field, what was got
and what is allowed.

Pure: knows the size of the vocabulary and the limits, neither nodes nor protocols. Types are the
borders' business; here values are looked at.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from pdserve.core.errors import InvalidRequestError
from pdserve.core.request import Grammar, SamplingParams
from pdserve.core.routing_config import LEAST_SLO_MS, MOST_SLO_MS

MAX_LOGPROBS = 20
MAX_STOP_STRINGS, MAX_STOP_CHARS = 16, 256
MAX_LOGIT_BIAS_ENTRIES, MAX_LOGIT_BIAS = 300, 100.0
MAX_STOP_TOKEN_IDS = 128
MAX_TEMPERATURE = 100.0
GREEDY_BELOW = 1e-5  # logits divided by less overflow; such a temperature means greedy
MAX_REPETITION_PENALTY = 100.0
MAX_PRIORITY = 100
INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
LEAST_INTERVAL_S, MOST_INTERVAL_S = 0.1, 3600.0
MAX_SALT_CHARS = 256
SHOWN_CHARS = 80
MAX_ID_DIGITS = 10
MAX_TOKEN_IDS = 1_000_000  # that are made a text in one call


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFields:
    """The sampling fields of a request as they came; None: not given. The two ``..._field`` are
    what the API calls a field.
    """

    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[str, float] | Mapping[int, float] | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    logprobs: int | None = None
    logprobs_field: str = "logprobs"
    prompt_logprobs: int | None = None
    n: int | None = None
    best_of: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    cache_salt: str | None = None
    grammar: Grammar | None = None


def check_sampling(fields: SamplingFields, *, vocab_size: int, max_n: int) -> None:
    """Raise InvalidRequestError for the first value out of range."""
    _check_lengths(fields)
    _between("temperature", fields.temperature, 0.0, MAX_TEMPERATURE)
    _above_zero("top_p", fields.top_p, 1.0)
    if fields.top_k is not None and not -1 <= fields.top_k <= INT32_MAX:
        raise _wrong("top_k", fields.top_k, "-1 or 0 (all tokens), or 1 and more")
    _between("min_p", fields.min_p, 0.0, 1.0)
    _between("presence_penalty", fields.presence_penalty, -2.0, 2.0)
    _between("frequency_penalty", fields.frequency_penalty, -2.0, 2.0)
    _above_zero("repetition_penalty", fields.repetition_penalty, MAX_REPETITION_PENALTY)
    _parse_logit_bias(fields.logit_bias or {}, vocab_size)
    if fields.seed is not None and not INT64_MIN <= fields.seed <= INT64_MAX:
        raise _wrong("seed", fields.seed, "64-bit integers")
    _check_stop(fields.stop)
    if len(fields.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise wrong_count("stop_token_ids", len(fields.stop_token_ids), MAX_STOP_TOKEN_IDS)
    check_token_ids("stop_token_ids", fields.stop_token_ids, vocab_size)
    if fields.logprobs is not None and not 0 <= fields.logprobs <= MAX_LOGPROBS:
        raise _wrong(fields.logprobs_field, fields.logprobs, f"0 to {MAX_LOGPROBS}")
    if fields.prompt_logprobs is not None and not 0 <= fields.prompt_logprobs <= MAX_LOGPROBS:
        raise _wrong("prompt_logprobs", fields.prompt_logprobs, f"0 to {MAX_LOGPROBS}")
    check_count("n", fields.n, max_n)
    _check_best_of(fields, max_n)
    check_slo("ttft_slo_ms", fields.ttft_slo_ms)
    check_slo("tpot_slo_ms", fields.tpot_slo_ms)
    check_cache_salt(fields.cache_salt)


def check_count(field: str, count: int | None, most: int) -> None:
    """Raise InvalidRequestError for a count that is not 1 to ``most``."""
    if count is not None and not 1 <= count <= most:
        raise _wrong(field, count, f"1 to {most}")


def check_slo(field: str, limit_ms: float | None) -> None:
    """Raise InvalidRequestError for a limit that no request could keep, or that is none."""
    _between(field, limit_ms, LEAST_SLO_MS, MOST_SLO_MS)


def check_interval(field: str, interval_s: float) -> None:
    """Raise InvalidRequestError for a time between messages that is too short or endless."""
    _between(field, interval_s, LEAST_INTERVAL_S, MOST_INTERVAL_S)


def check_priority(priority: int | None) -> int:
    """The priority, 0 where none is given. Raises InvalidRequestError for one out of range."""
    if priority is not None and not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        allowed = f"{-MAX_PRIORITY} (earliest) to {MAX_PRIORITY} (latest)"
        raise _wrong("priority", priority, allowed)
    return priority or 0


def to_sampling_params(fields: SamplingFields, *, max_tokens: int, seed: int) -> SamplingParams:
    """The checked fields with defaults in place. ``seed`` is used where the client gave none."""
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens or 0,
        temperature=_temperature(fields.temperature),
        top_p=_given(fields.top_p, 1.0),
        top_k=fields.top_k if fields.top_k is not None and fields.top_k > 0 else None,
        min_p=fields.min_p or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=_given(fields.repetition_penalty, 1.0),
        logit_bias=_parse_logit_bias(fields.logit_bias or {}, None),
        # Clients may send any 64-bit integer; nodes count from zero.
        seed=seed if fields.seed is None else fields.seed % 2**63,
        stop_token_ids=tuple(fields.stop_token_ids),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=fields.logprobs,
        prompt_logprobs=fields.prompt_logprobs,
    )


def check_token_ids(field: str, token_ids: Iterable[object], vocab_size: int) -> tuple[int, ...]:
    """The ids as integers. Raises InvalidRequestError naming the first wrong one's position."""
    ids = tuple(token_ids)
    if _are_integers(ids) and (not ids or (min(ids) >= 0 and max(ids) < vocab_size)):
        return ids
    for i, token_id in enumerate(ids):
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise InvalidRequestError(
                f"{field}[{i}]", f"got {shown(token_id)}, expected a token id (an integer)"
            )
        if not 0 <= token_id < vocab_size:
            raise _wrong(f"{field}[{i}]", token_id, f"token ids 0 to {vocab_size - 1}")
    raise AssertionError("one of them is wrong")


def parse_prompts(
    prompt: object, *, vocab_size: int, max_prompts: int
) -> list[str | tuple[int, ...]]:
    """One or several prompts: a text, token ids, or a list of either.

    Raises InvalidRequestError naming ``prompt`` and the position.
    """
    match prompt:
        case str():
            return [_parse_prompt("prompt", prompt, vocab_size)]
        case []:
            raise InvalidRequestError("prompt", "it is empty")
        case [int(), *_]:
            return [_parse_prompt("prompt", prompt, vocab_size)]
        case list():
            if len(prompt) > max_prompts:
                raise wrong_count("prompt", len(prompt), max_prompts)
            return [
                _parse_prompt(f"prompt[{i}]", item, vocab_size) for i, item in enumerate(prompt)
            ]
        case _:
            raise InvalidRequestError("prompt", f"got {shown(prompt)}, expected {PROMPT_FORMS}")


PROMPT_FORMS = "a text, a list of token ids, or a list of either"


def shown(value: object) -> str:
    """A value as an error message shows it: short, and never megabytes of digits."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, int) and abs(value) >= 10**SHOWN_CHARS:
        return "a huge integer"
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."


def _parse_prompt(field: str, prompt: object, vocab_size: int) -> str | tuple[int, ...]:
    if prompt in ("", []):
        raise InvalidRequestError(field, "it is empty")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        return check_token_ids(field, prompt, vocab_size)
    raise InvalidRequestError(field, f"got {shown(prompt)}, expected a text or a list of token ids")


def _are_integers(values: tuple[object, ...]) -> TypeGuard[tuple[int, ...]]:
    """Exactly: no booleans. At once, as a look at each takes several times as long."""
    return set(map(type, values)) <= {int}


def check_cache_salt(salt: str | None) -> None:
    """Raise InvalidRequestError for a salt that is empty or very long."""
    if salt is not None and not 1 <= len(salt) <= MAX_SALT_CHARS:
        raise _wrong("cache_salt", salt, f"texts of 1 to {MAX_SALT_CHARS} characters")


def _check_lengths(fields: SamplingFields) -> None:
    name, most, least = fields.max_tokens_field, fields.max_tokens, fields.min_tokens
    if most is not None and not 1 <= most <= INT32_MAX:
        raise _wrong(name, most, f"1 to {INT32_MAX}")
    if least is not None and not 0 <= least <= INT32_MAX:
        raise _wrong("min_tokens", least, f"0 to {INT32_MAX}")
    if most is not None and least is not None and least > most:
        raise InvalidRequestError("min_tokens", f"got {least}, more than {name} {most}")


def _check_best_of(fields: SamplingFields, max_n: int) -> None:
    check_count("best_of", fields.best_of, max_n)
    num_given = fields.n or 1
    if fields.best_of is not None and fields.best_of < num_given:
        raise InvalidRequestError("best_of", f"got {fields.best_of}, less than n {num_given}")


def _check_stop(stop: Sequence[str]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise wrong_count("stop", len(stop), MAX_STOP_STRINGS)
    for i, text in enumerate(stop):
        if not text:
            raise InvalidRequestError(f"stop[{i}]", "it is empty")
        if len(text) > MAX_STOP_CHARS:
            raise InvalidRequestError(
                f"stop[{i}]", f"it has {len(text)} characters, at most {MAX_STOP_CHARS} are allowed"
            )


def _parse_logit_bias(
    logit_bias: Mapping[str, float] | Mapping[int, float], vocab_size: int | None
) -> tuple[tuple[int, float], ...]:
    """Token ids with their bias; checked where the vocabulary is given."""
    if len(logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise wrong_count("logit_bias", len(logit_bias), MAX_LOGIT_BIAS_ENTRIES)
    parsed: dict[int, float] = {}
    for key, bias in logit_bias.items():
        if isinstance(key, str) and not (
            key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS
        ):
            raise InvalidRequestError("logit_bias", f"got the key {shown(key)}, expected token ids")
        token_id = int(key)
        if vocab_size is not None:
            if not 0 <= token_id < vocab_size:
                raise _wrong("logit_bias", token_id, f"token ids 0 to {vocab_size - 1}")
            _between(f"logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        parsed[token_id] = float(bias)
    return tuple(parsed.items())


def _temperature(value: float | None) -> float:
    given = _given(value, 1.0)
    return given if given >= GREEDY_BELOW else 0.0


def _given(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _between(field: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:  # false for NaN too
        raise _wrong(field, value, f"numbers from {low:g} to {high:g}")


def _above_zero(field: str, value: float | None, high: float) -> None:
    if value is not None and not (value > 0 and value <= high and math.isfinite(value)):
        raise _wrong(field, value, f"numbers above 0, at most {high:g}")


def _wrong(field: str, value: object, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(field, f"got {shown(value)}, allowed are {allowed}")


def wrong_count(field: str, count: int, most: int) -> InvalidRequestError:
    """The error of a list or an object that has too many entries."""
    return InvalidRequestError(field, f"got {count} entries, at most {most} are allowed")
