"""What a client asks for and what it gets: immutable, plain, the same on every node.

Owns the words ``request``, ``route``, sampling parameters and outputs. A request is named by
``(request_id, attempt)``, both made by the router; a decode node numbers the prefill legs that it
asks for, so that late news of an earlier leg can be told apart. Checks of client input live at the
border (``router/validation.py``); the values here are taken as right.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class RequestKey(NamedTuple):
    """The name of one attempt at a request, unique over the whole system."""

    request_id: str
    attempt: int


class HandoffId(NamedTuple):
    """The name of one handoff. ``leg`` counts all that its decode node has asked for."""

    request_id: str
    attempt: int
    leg: int

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.request_id, self.attempt)


class FinishReason(StrEnum):
    """Why a choice ended; the values of the OpenAI API, and ``abort``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class RouteTaken(StrEnum):
    """Where a request's prompt was really prefilled."""

    DISAGGREGATED = "disaggregated"
    LOCAL = "local"
    FALLBACK = "fallback"


class GrammarKind(StrEnum):
    """The languages that a grammar can be written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"  # of llguidance
    EBNF = "ebnf"  # that, or GBNF of llama.cpp, whichever it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What the whole text of an answer has to be. ``field`` is what the client called it."""

    kind: GrammarKind
    text: str
    field: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. The names and meanings are vLLM's; ``None`` is unset, never zero.

    Logits are changed in this order: ``logit_bias``, ends masked until ``min_tokens``, repetition,
    frequency and presence penalties, temperature, then ``top_k``, ``top_p`` and ``min_p`` on what
    is left. Log-probabilities are those of the raw logits.
    """

    max_tokens: int  # output tokens at most, >= 1
    min_tokens: int = 0  # no end token before so many output tokens
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # the router draws one where the client gave none; 0 <= seed < 2**63
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: the sampled token's and the top k
    prompt_logprobs: int | None = None  # likewise, of every token of the prompt but the first

    @property
    def needs_history(self) -> bool:
        """True where the ranks must count the tokens of prompt and output."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where a request goes: prefill alternates in order, then, if allowed, the decode node.

    The router alone decides the ``lane``, the place of the prompt's length class among the classes:
    its borders may move, and another router may have others.
    """

    decode_node: str
    prefill_nodes: tuple[str, ...]  # empty: prefill on the decode node
    local_allowed: bool  # may fall back to the decode node when all alternates failed
    lane: int = 0  # of the prefill nodes' queues: 0 is that of the shortest prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One attempt at a request as the router hands it to a decode node.

    ``token_ids[:prompt_len]`` is the client's prompt; what follows are output tokens that the
    client already has (a retry). ``choices`` are the indices of the wanted continuations (``n``).
    KV is shared only between requests of one ``cache_salt``. ``traceparent`` is the router's span.
    """

    request_id: str
    attempt: int
    token_ids: tuple[int, ...]
    prompt_len: int
    choices: tuple[int, ...]
    sampling: SamplingParams
    route: Route
    cache_salt: bytes = b""
    traceparent: str | None = None  # None: not traced
    grammar: Grammar | None = None

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.request_id, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural log-probabilities at one position: the sampled token's and the ``top`` most likely
    ones'.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), best first


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprob:
    """How likely one token of a prompt was after those before it, and which were the likeliest.

    ``rank`` is 1 for the likeliest token.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), best first


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOutput:
    """Log-probabilities of prompt tokens, as chunks of the prompt are computed. ``index`` is the
    position of the first of these. All come before the request's first token.
    """

    request_id: str
    attempt: int
    index: int
    logprobs: tuple[PromptLogprob, ...]


@dataclass(slots=True, kw_only=True)  # one a token: frozen it takes four times as long to make
class TokenOutput:
    """New tokens of one choice. ``index`` is the number of output tokens before the first of these.

    ``logprobs`` is empty or as long as ``token_ids``. ``stop_token_id`` is the end token that
    ended the choice; it is the last of ``token_ids`` then.
    """

    request_id: str
    attempt: int
    choice: int
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.request_id, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailure:
    """A leg ended without its answer. ``kind`` is ``PdserveError.kind`` of the error; the message
    is fit for the client.
    """

    request_id: str
    attempt: int
    kind: str
    message: str
    retryable: bool  # another node may do better

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.request_id, self.attempt)
