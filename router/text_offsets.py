"""Where in a text each of its tokens begins, as ``text_offset`` of completions tells it.

A token of which nothing is shown yet, as it begins a character, begins where that character will
stand.
"""

from collections.abc import Sequence

from pdserve.text.detokenizer import StreamDetokenizer
from pdserve.text.tokenizer import Tokenizer
from router.choice_text import NUM_TOKENS_BEFORE


class TextOffsets:
    """Those of one choice's tokens, which ``prompt_ids`` stand before; its text begins with
    ``start`` characters of an echoed prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids: tuple[int, ...],
        start: int,
        skip_special_tokens: bool,
    ) -> None:
        self._end = start
        self._detokenizer = StreamDetokenizer(
            tokenizer,
            skip_special_tokens=skip_special_tokens,
            after=prompt_ids[-NUM_TOKENS_BEFORE:],
        )

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """The offsets of the next tokens."""
        *offsets, self._end = _offsets(self._detokenizer, token_ids, self._end)
        return offsets


def prompt_offsets(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> list[int]:
    """Those of an echoed prompt's tokens, from its beginning on."""
    return _offsets(StreamDetokenizer(tokenizer), prompt_ids, 0)[:-1]


def _offsets(detokenizer: StreamDetokenizer, token_ids: Sequence[int], start: int) -> list[int]:
    """Of each token, and the end of the text so far."""
    offsets = [start]
    for token_id in token_ids:
        offsets.append(offsets[-1] + len(detokenizer.push((token_id,))))
    return offsets
