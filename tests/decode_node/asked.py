"""What a test has asked of a decode node: requests with their right answers, and their legs."""

from dataclasses import dataclass, field

from pdserve.core.kv_layout import BlockId
from pdserve.core.request import FinishReason, RequestKey, SamplingParams
from pdserve.engine.constraint import Constraint
from pdserve.engine.sequence import Sequence
from tests.oracle import FakeModel
from tests.prompts import make_prompt


@dataclass(eq=False)
class Asked:
    """One request: how it is routed, what is right and what has come."""

    key: RequestKey
    prompt: tuple[int, ...]
    route: str  # local, remote or fallback
    expected: dict[int, list[int]]
    got: dict[int, list[int]]
    living: dict[int, Sequence]
    ended: dict[int, FinishReason] = field(default_factory=dict)
    num_failures: int = 0
    aborted: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt and what has come of the first choice."""
        return (*self.prompt, *self.got[0])

    @property
    def num_blocks(self) -> int:
        """Blocks that its living sequences hold."""
        return sum(len(sequence.blocks) for sequence in set(self.living.values()))


@dataclass(eq=False)
class Leg:
    """One prefill elsewhere and its handoff into ``blocks``."""

    asked: Asked
    sequence: Sequence
    blocks: tuple[BlockId, ...]
    num_pushed: int = 0
    has_first_tokens: bool = False
    is_ready: bool = False
    dropped: bool = False


def make_asked(
    model: FakeModel,
    number: int,
    now_s: float,
    route: str,
    prompt_len: int,
    max_tokens: int,
    *,
    num_choices: int = 1,
    ends: tuple[int, ...] = (),
    min_tokens: int = 0,
    penalty: float = 0.0,
    num_alike: int = 0,
    after: tuple[int, ...] = (),
    cache_salt: bytes = b"",
    constraint: Constraint | None = None,
) -> Asked:
    """The ``number``-th request. Its tokens are like no other request's, but for the first
    ``num_alike`` (``make_prompt``); with ``after`` they follow those of a conversation.
    """
    sampling = SamplingParams(
        max_tokens=max_tokens, min_tokens=min_tokens, presence_penalty=penalty, seed=number
    )
    choices = tuple(range(num_choices))
    sequence = Sequence(
        key=RequestKey(f"r{number}", 0),
        choices=choices,
        sampling=sampling,
        prompt_len=prompt_len,
        token_ids=[*after, *make_prompt(number, prompt_len, num_alike=num_alike)][:prompt_len],
        end_token_ids=ends,
        max_len=prompt_len + max_tokens,
        arrived_s=now_s,
        cache_salt=cache_salt,
        constraint=constraint,
    )
    return Asked(
        key=sequence.key,
        prompt=tuple(sequence.token_ids),
        route=route,
        expected={choice: _answer(model, sequence, choice) for choice in choices},
        got={choice: [] for choice in choices},
        living=dict.fromkeys(choices, sequence),
    )


def _answer(model: FakeModel, sequence: Sequence, choice: int) -> list[int]:
    return model.answer(
        sequence.token_ids,
        sequence.sampling,
        choice,
        prompt_len=sequence.prompt_len,
        end_token_ids=sequence.end_token_ids,
        max_len=sequence.max_len,
    )
