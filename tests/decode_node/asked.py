"""What a test has asked of a decode node: requests with their right answers, and their legs."""

from dataclasses import dataclass, field

from pdserve.core.kv_layout import BlockId
from pdserve.core.request import FinishReason, RequestKey, SamplingParams
from pdserve.engine.sequence import Sequence
from tests.oracle import FakeModel

VOCAB_SIZE = 61


@dataclass(eq=False)
class Asked:
    """One request: how it is routed, what is right and what has come."""

    key: RequestKey
    route: str  # local, remote or fallback
    expected: dict[int, list[int]]
    got: dict[int, list[int]]
    living: dict[int, Sequence]
    ended: dict[int, FinishReason] = field(default_factory=dict)
    num_failures: int = 0
    aborted: bool = False

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
) -> Asked:
    """The ``number``-th request. Its tokens are like no other request's."""
    sampling = SamplingParams(
        max_tokens=max_tokens, min_tokens=min_tokens, presence_penalty=penalty, seed=number
    )
    choices = tuple(range(num_choices))
    sequence = Sequence(
        key=RequestKey(f"r{number}", 0),
        choices=choices,
        sampling=sampling,
        prompt_len=prompt_len,
        token_ids=[(number * 7 + i * (number + 3)) % VOCAB_SIZE for i in range(prompt_len)],
        end_token_ids=ends,
        max_len=prompt_len + max_tokens,
        arrived_s=now_s,
    )
    return Asked(
        key=sequence.key,
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
