"""Text from a stream of token ids, as soon as it is certain.

What is put out, joined, is exactly what ``Tokenizer.decode`` makes of all the ids; characters that
the next token may complete or change are held back. A token's cost does not grow with the text.
"""

from collections.abc import Sequence

from pdserve.text.tokenizer import Tokenizer


class StreamDetokenizer:
    """One stream of one choice."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        after: Sequence[int] = (),
    ) -> None:
        """``after`` are tokens before the stream, of whose text nothing is put out.

        With them the stream is not the start of a text, where some tokenizers drop a space.
        """
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._chain = tokenizer.new_chain()
        self.push(after)
        self._chain.flush()

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that the next tokens make certain."""
        pieces = self._tokenizer.pieces(token_ids, skip_special_tokens=self._skips_special)
        return self._chain.push(pieces)

    def flush(self) -> str:
        """What was held back, as no token follows."""
        return self._chain.flush()
