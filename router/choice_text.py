"""One choice's tokens into text, as they come: detokenised, cut at a stop string or stop token.

Text that may be the beginning of a stop string, and bytes that do not make up a character yet, are
held back until the next tokens decide. The result does not depend on how tokens are grouped.
"""

from dataclasses import dataclass

from pdserve.core.request import FinishReason, TokenLogprobs, TokenOutput
from pdserve.text.detokenizer import StreamDetokenizer
from pdserve.text.stop_strings import StopStrings
from pdserve.text.tokenizer import Tokenizer

NUM_TOKENS_BEFORE = 8  # more of the prompt does not change how its continuation begins


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How tokens become the text that the client sees. The names are vLLM's."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0  # stop strings are not looked for in what so many tokens say
    stop_token_ids: frozenset[int] = frozenset()  # the client's; others are the model's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What new tokens added to a choice. Tokens after the one that completed a stop string are
    left out. ``stop_reason``: the stop string or the client's stop token that ended it.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None


class ChoiceText:
    """Push outputs until a piece with a ``finish_reason`` comes back.

    ``prompt_ids`` stand before the text; what it begins with can depend on them.
    """

    def __init__(
        self, tokenizer: Tokenizer, rules: TextRules, prompt_ids: tuple[int, ...] = ()
    ) -> None:
        self._rules = rules
        self._detokenizer = StreamDetokenizer(
            tokenizer,
            skip_special_tokens=rules.skip_special_tokens,
            after=prompt_ids[-NUM_TOKENS_BEFORE:],
        )
        self._stop = StopStrings(rules.stop, rules.include_stop_str_in_output)
        self._num_tokens = 0

    def push(self, output: TokenOutput) -> Piece:
        """Text of the next tokens; with the output's finish everything held back comes out."""
        text, used = self._say(output.token_ids, self._num_spoken(output))
        if self._stop.matched is None and output.finish_reason is not None:
            text += self._find_stop(self._detokenizer.flush())
            if self._stop.matched is None:
                text += self._stop.flush()
        if self._stop.matched is not None:
            return _piece(output, text, used, FinishReason.STOP, self._stop.matched)
        named = output.stop_token_id in self._rules.stop_token_ids
        reason = output.stop_token_id if named else None
        return _piece(output, text, used, output.finish_reason, reason)

    def _say(self, token_ids: tuple[int, ...], num_spoken: int) -> tuple[str, int]:
        """The text of the first ``num_spoken`` tokens and how many tokens there are up to a stop
        string.
        """
        if not self._rules.stop:
            return self._detokenizer.push(token_ids[:num_spoken]), len(token_ids)
        text = ""
        for used, token_id in enumerate(token_ids[:num_spoken], start=1):
            self._num_tokens += 1
            text += self._find_stop(self._detokenizer.push((token_id,)))
            if self._stop.matched is not None:
                return text, used
        return text, len(token_ids)

    def _find_stop(self, text: str) -> str:
        if self._num_tokens <= self._rules.min_tokens:
            return text
        return self._stop.push(text)

    def _num_spoken(self, output: TokenOutput) -> int:
        """How many of the tokens have text: an end token has none, unless asked for."""
        ended = output.stop_token_id is not None and not self._rules.include_stop_str_in_output
        return len(output.token_ids) - ended


def _piece(
    output: TokenOutput,
    text: str,
    used: int,
    finish_reason: FinishReason | None,
    stop_reason: str | int | None,
) -> Piece:
    return Piece(
        text=text,
        token_ids=output.token_ids[:used],
        logprobs=output.logprobs[:used],
        finish_reason=finish_reason,
        stop_reason=stop_reason,
    )
