"""A sequence: the tokens of one request (or one of its choices) on one node, for one life.

A sequence is reserved, computed and released once. What is preempted, withdrawn or retried goes on
as a new sequence (``again``) with the tokens so far, so that late news of the old life meets an
object that is already over.
"""

from collections.abc import Sequence as Run
from dataclasses import dataclass, field, replace

from pdserve.core.kv_layout import BlockId
from pdserve.core.prefix_hash import PrefixHash
from pdserve.core.request import FinishReason, RequestKey, SamplingParams
from pdserve.engine.batch import Slot
from pdserve.engine.constraint import Constraint


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Mutable state; the scheduler and its ledger are the only writers.

    ``token_ids[:prompt_len]`` is the client's prompt, the rest are output tokens that are known.
    KV of positions [0, num_planned) is there or will be by steps that are in flight; that of
    [0, num_cached) was there before this sequence began, in blocks that others may share.
    """

    key: RequestKey
    choices: tuple[int, ...]
    sampling: SamplingParams
    prompt_len: int
    token_ids: list[int]
    end_token_ids: tuple[int, ...]
    max_len: int  # tokens at most, prompt included
    arrived_s: float
    cache_salt: bytes = b""  # sequences of different salts share no KV
    lane: int = 0  # of a prefill node's queue
    constraint: Constraint | None = None
    is_cacheable: bool = True  # False: it neither uses nor leaves anything in the prefix cache

    blocks: list[BlockId] = field(default_factory=list)
    block_names: list[PrefixHash] = field(default_factory=list)  # of full blocks, as far as needed
    num_named: int = 0  # blocks that the prefix cache has been told of, or has given
    num_cached: int = 0
    num_planned: int = 0
    num_prompt: int = field(init=False)  # tokens whose KV must be there before the first sample
    slot: Slot | None = None
    num_known_blocks: int = 0  # blocks that the ranks have been told of
    num_in_flight: int = 0  # steps that touch this sequence
    in_transfer: bool = False  # a handoff may still read or write its blocks
    over: bool = False  # finished, aborted or gone on as another sequence
    released: bool = False

    def __post_init__(self) -> None:
        self.num_prompt = len(self.token_ids)

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def num_expected(self) -> int:
        """Known tokens and those that steps in flight will sample."""
        return max(len(self.token_ids), self.num_planned + 1)

    @property
    def num_unplanned_prompt(self) -> int:
        """Prompt tokens that no step has computed or will compute yet."""
        return max(0, self.num_prompt - self.num_planned)

    @property
    def may_sample(self) -> bool:
        """False while a constraint waits for a token of a step in flight, or for its mask."""
        if self.constraint is None:
            return True
        return self.num_expected == len(self.token_ids) and self.constraint.mask is not None

    @property
    def token_mask(self) -> bytes | None:
        """A bit for each token that may be sampled; None where all may. Only if ``may_sample``."""
        return None if self.constraint is None else self.constraint.mask

    def append(self, token_id: int) -> FinishReason | None:
        """Add a sampled token and say whether the sequence ends with it."""
        self.token_ids.append(token_id)
        if token_id in self.end_token_ids:
            return FinishReason.STOP
        if self.constraint is not None and self.constraint.advance(token_id):
            return FinishReason.STOP
        if len(self.token_ids) >= self.max_len:
            return FinishReason.LENGTH
        return None

    def again(self) -> "Sequence":
        """The next life of this sequence: the same tokens, no blocks.

        With a first token all log-probabilities of the prompt are told: they are not asked again.
        """
        new = self._child(self.choices, self.token_ids, self.constraint)
        new.block_names = list(self.block_names)
        return new

    def forked(self, choice: int) -> "Sequence":
        """The sequence of one of several choices, from the prompt on."""
        constraint = None if self.constraint is None else self.constraint.copy()
        return self._child((choice,), self.token_ids[: self.num_prompt], constraint)

    def _child(
        self, choices: tuple[int, ...], token_ids: Run[int], constraint: Constraint | None
    ) -> "Sequence":
        has_first_token = self.num_outputs > 0 or len(choices) < len(self.choices)
        prompt_logprobs = None if has_first_token else self.sampling.prompt_logprobs
        return Sequence(
            key=self.key,
            choices=choices,
            sampling=replace(self.sampling, prompt_logprobs=prompt_logprobs),
            prompt_len=self.prompt_len,
            token_ids=list(token_ids),
            end_token_ids=self.end_token_ids,
            max_len=self.max_len,
            arrived_s=self.arrived_s,
            cache_salt=self.cache_salt,
            lane=self.lane,
            constraint=constraint,
            is_cacheable=self.is_cacheable,
        )
