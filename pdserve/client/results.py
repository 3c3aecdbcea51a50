"""What the client gives back: plain values, no protocol types."""

from dataclasses import dataclass

from pdserve.core.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token and its natural log-probability."""

    token_id: int
    token: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionLogprobs:
    """The sampled token's log-probability at one position, and the likeliest tokens'."""

    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptToken:
    """One token of the prompt, how likely it was after those before it, and the likeliest there.

    ``rank`` is 1 for the likeliest. The first token has neither: nothing stands before it.
    """

    token_id: int
    token: str
    logprob: float | None
    rank: int | None
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a call. ``cached_tokens``: of the prompt, those that were not computed for it."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One message of a stream. The last one of a choice has a ``finish_reason``; the last one of
    the stream has ``usage`` and, where asked for, the ``timeline``, and no text. Those that have
    ``prompt_logprobs`` come before all others, and have nothing else.
    """

    request_id: str
    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: str | None
    stop_reason: str | int | None
    usage: Usage | None
    timeline: Timeline | None
    prompt_logprobs: tuple[PromptToken, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One whole answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """All answers to one prompt."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timeline: Timeline | None
    prompt_logprobs: tuple[PromptToken, ...] = ()

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The served model."""

    model: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """The router. ``reason`` says why it is not ready, or why it is degraded."""

    version: str
    ready: bool
    reason: str | None
    routes: dict[str, int]  # prompts by where they were prefilled


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """One node's load."""

    node: str
    role: str
    ready: bool
    total_blocks: int
    free_blocks: int
    running: int
    waiting: int
    block_size: int
    queued_prefill_tokens: int
    waiting_for_blocks: int
    context_tokens: int
    reason: str | None  # why it is not ready
