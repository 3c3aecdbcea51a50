"""Text to token ids and back, as the model's ``tokenizer.json`` says.

Wraps the ``tokenizers`` library. As in Hugging Face's loaders ``tokenizer.json`` alone says whether
BOS or EOS are added, and ``tokenizer_config.json`` names special tokens. Knows nothing of chats or
streams.
"""

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from pdserve.core.errors import InvalidRequestError, ModelFilesError
from pdserve.text.decoding import DecodingChain, make_chain
from pdserve.text.model_files import TokenizerConfig, parse_json, read_text, read_tokenizer_config


class Tokenizer:
    """The tokenizer of a model directory. Immutable after construction; threads may share it."""

    def __init__(self, directory: Path) -> None:
        """Raises ModelFilesError naming the file that is missing or damaged."""
        path = directory / "tokenizer.json"
        text = read_text(path)
        self._decoder = parse_json(text, path).get("decoder")
        config = read_tokenizer_config(directory)
        try:
            self._backend = tokenizers.Tokenizer.from_str(text)
            self._alone = make_chain(self._decoder)
        except Exception as error:  # the library raises nothing narrower
            raise ModelFilesError(f"{path}: not a usable tokenizer: {error}") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self._special_tokens = config.special_tokens
        _declare_tokens(self._backend, config)
        self._special_ids = frozenset(
            token_id
            for token_id, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        )
        # One more than the largest token id; the model's own vocabulary may be padded beyond.
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self._pieces = _pieces_by_id(self._backend, self.vocab_size)
        self._plain_pieces = {
            token_id: piece
            for token_id, piece in self._pieces.items()
            if token_id not in self._special_ids
        }

    @property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by their names in chat templates: ``bos_token``, ``eos_token``, …"""
        return dict(self._special_tokens)

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of("eos_token")

    def to_json(self) -> str:
        """All of it as a ``tokenizer.json``, with the tokens that only the configuration knows."""
        return str(self._backend.to_str())

    def encode(
        self, text: str, *, add_special_tokens: bool = True, field: str = "prompt"
    ) -> list[int]:
        """The token ids of ``text``, with the BOS and EOS that the model adds if they are wanted.

        Raises InvalidRequestError naming ``field`` where the text is not Unicode (lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(field, f"not valid Unicode: {error.reason}") from error
        # The batch call gives up the GIL: a long text in a thread holds up no event loop.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids``; ids outside the vocabulary have none."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def is_special(self, token_id: int) -> bool:
        """True for tokens that ``decode`` leaves out."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for on its own; not always whole characters."""
        piece = self._pieces.get(token_id)
        if piece is None:
            return b""
        return piece.encode() if self.is_special(token_id) else self._alone.as_bytes(piece)

    def token_text(self, token_id: int) -> str:
        """``token_bytes`` as text, with U+FFFD for what is not whole."""
        return self.token_bytes(token_id).decode(errors="replace")

    def pieces(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> list[str]:
        """Tokens as the vocabulary writes them, the input of ``new_chain``."""
        table = self._plain_pieces if skip_special_tokens else self._pieces
        return [table[token_id] for token_id in token_ids if token_id in table]

    def new_chain(self) -> DecodingChain:
        """What turns the pieces of one stream into text."""
        return make_chain(self._decoder)

    def _id_of(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def _pieces_by_id(backend: tokenizers.Tokenizer, vocab_size: int) -> dict[int, str]:
    pieces = ((token_id, backend.id_to_token(token_id)) for token_id in range(vocab_size))
    return {token_id: piece for token_id, piece in pieces if piece is not None}


def _declare_tokens(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    """Add the tokens that only the configuration knows, and mark those special that it calls so."""
    for spec in config.added_tokens:
        if backend.token_to_id(spec.content) is None:
            token = tokenizers.AddedToken(
                spec.content,
                single_word=spec.single_word,
                lstrip=spec.lstrip,
                rstrip=spec.rstrip,
                normalized=spec.normalized,
                special=spec.special,
            )
            (backend.add_special_tokens if spec.special else backend.add_tokens)([token])
    special = {
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    }
    for content in (*config.special_tokens.values(), *config.more_special_tokens):
        # One that has no id gets none: the model has no embedding for it.
        if content not in special and backend.token_to_id(content) is not None:
            backend.add_special_tokens([tokenizers.AddedToken(content, normalized=False)])
