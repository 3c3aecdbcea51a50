"""One choice's tokens into text, as they come: detokenised, cut at a stop string or stop token.

Text that may be the beginning of a stop string, and bytes that do not make up a character yet, are
held back until the next tokens decide. The result does not depend on how tokens are grouped.
"""

from dataclasses import dataclass

from pdserve.core.request import FinishReason, PromptLogprob, TokenLogprobs, TokenOutput
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
class Delta:
    """What new tokens added to choice ``choice`` of prompt ``prompt``; the last one has a
    ``finish_reason``. Tokens after the one that completed a stop string are left out.
    ``stop_reason``: the stop string or the client's stop token that ended the choice.
    """

    prompt: int
    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    # With a choice's first tokens, where asked for: those of the prompt's tokens but the first.
    prompt_logprobs: tuple[PromptLogprob, ...] | None = None


class ChoiceText:
    """Push outputs until a delta with a ``finish_reason`` comes back.

    ``prompt_ids`` stand before the text; what it begins with can depend on them. ``prompt`` is
    their number within the call.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        rules: TextRules,
        prompt_ids: tuple[int, ...] = (),
        *,
        prompt: int = 0,
    ) -> None:
        self._rules = rules
        self._prompt = prompt
        self._detokenizer = StreamDetokenizer(
            tokenizer,
            skip_special_tokens=rules.skip_special_tokens,
            after=prompt_ids[-NUM_TOKENS_BEFORE:],
        )
        self._stop = StopStrings(rules.stop, rules.include_stop_str_in_output)
        self._num_tokens = 0

    def push(self, output: TokenOutput) -> Delta:
        """Text of the next tokens; with the output's finish everything held back comes out."""
        text, used = self._say(output.token_ids, self._num_spoken(output))
        if self._stop.matched is None and output.finish_reason is not None:
            text += self._find_stop(self._detokenizer.flush())
            if self._stop.matched is None:
                text += self._stop.flush()
        finish_reason: FinishReason | None = output.finish_reason
        stop_reason: str | int | None = None
        if self._stop.matched is not None:
            finish_reason, stop_reason = FinishReason.STOP, self._stop.matched
        elif output.stop_token_id in self._rules.stop_token_ids:
            stop_reason = output.stop_token_id
        return Delta(
            prompt=self._prompt,
            choice=output.choice,
            text=text,
            token_ids=output.token_ids[:used],
            logprobs=output.logprobs[:used],
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

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
