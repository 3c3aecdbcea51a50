"""What a decode node's scheduler has decided or learned, for the node to act on."""

from dataclasses import dataclass

from pdserve.core.request import FinishReason, TokenLogprobs
from pdserve.engine.batch import Scored
from pdserve.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """Blocks are reserved: have the prompt prefilled by the sequence's route."""

    sequence: Sequence


@dataclass(slots=True, kw_only=True)  # one a token: frozen it takes four times as long to make
class NewToken:
    """One more token; with ``finish_reason`` it is the last and the sequence is over."""

    sequence: Sequence
    token_id: int
    index: int  # output tokens before it
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScored:
    """Log-probabilities of prompt tokens, which were computed here."""

    sequence: Sequence
    scored: Scored


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """The choices of ``parent`` go on as ``children``."""

    parent: Sequence
    children: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """``old`` is over for want of blocks and goes on as ``new``, which wait."""

    old: Sequence
    new: tuple[Sequence, ...]


Event = Admitted | NewToken | PromptScored | Forked | Replaced


def sequence_of(event: Event) -> Sequence:
    """The sequence that it is about; of several the one that was there before."""
    match event:
        case NewToken() | Admitted() | PromptScored():
            return event.sequence
        case Forked(parent=sequence) | Replaced(old=sequence):
            return sequence
