"""A model small enough to know by heart: which token follows which history, and so every answer.

Owns ``History``, the stand-in for KV (the KV of a position depends on all tokens up to it), and
the rule by which ``FakeExecutor`` samples. Knows no batch, block or slot.
"""

from collections.abc import Iterable, Iterator

from pdserve.core.request import PromptLogprob, SamplingParams, TokenLogprobs


class History:
    """The tokens up to one position. Equal histories of one model are the same object."""

    __slots__ = ("_next", "digest", "length", "parent", "token")

    def __init__(self, parent: "History | None", token: int) -> None:
        self.parent = parent
        self.token = token
        self.length: int = 0 if parent is None else parent.length + 1
        self.digest: int = hash((0 if parent is None else parent.digest, token))
        self._next: dict[int, History] = {}

    def then(self, token: int) -> "History":
        if token not in self._next:
            self._next[token] = History(self, token)
        return self._next[token]

    def tokens(self) -> list[int]:
        return [node.token for node in self.nodes()]

    def nodes(self) -> list["History"]:
        """The histories of all positions up to this one, first to last."""
        return list(self._backwards())[::-1]

    def _backwards(self) -> Iterator["History"]:
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


def logprobs_of(token: int, sampling: SamplingParams) -> tuple[TokenLogprobs, ...]:
    """What is told of one token: nothing, or what only this token has."""
    if sampling.logprobs is None:
        return ()
    top = tuple((token + i, -0.5 - token - i) for i in range(sampling.logprobs))
    return (TokenLogprobs(logprob=-0.5 - token, top=top),)


def prompt_logprob_of(token: int, sampling: SamplingParams) -> PromptLogprob:
    """What is told of one token of a prompt."""
    top = tuple((token + i, -0.25 - token - i) for i in range(sampling.prompt_logprobs or 0))
    return PromptLogprob(logprob=-0.25 - token, rank=1, top=top)


class FakeModel:
    """Samples a pure function of (history, seed, choice, position)."""

    def __init__(self, vocab_size: int = 61) -> None:
        self._vocab_size = vocab_size
        self.root = History(None, -1)

    def history(self, tokens: Iterable[int]) -> History:
        node = self.root
        for token in tokens:
            node = node.then(token)
        return node

    def sample(
        self,
        history: History,
        sampling: SamplingParams,
        choice: int,
        *,
        prompt_len: int,
        end_token_ids: tuple[int, ...],
        mask: bytes | None = None,
    ) -> int:
        """The token at position ``history.length``; ends are masked until ``min_tokens``.

        With a ``mask``, a bit for each token, one of those that it allows.
        """
        masked = end_token_ids if history.length - prompt_len < sampling.min_tokens else ()
        drawn = (history.digest, sampling.seed, choice, history.length)
        return next(
            token
            for salt in range(1 << 20)
            if (token := hash((*drawn, salt)) % self._vocab_size) not in masked
            and (mask is None or mask[token >> 3] >> (token & 7) & 1)
        )

    def answer(
        self,
        token_ids: Iterable[int],
        sampling: SamplingParams,
        choice: int,
        *,
        prompt_len: int,
        end_token_ids: tuple[int, ...],
        max_len: int,
    ) -> list[int]:
        """All output tokens after ``token_ids``, the end token included."""
        node = self.history(token_ids)
        out: list[int] = []
        while node.length < max_len and not (out and out[-1] in end_token_ids):
            out.append(
                self.sample(
                    node, sampling, choice, prompt_len=prompt_len, end_token_ids=end_token_ids
                )
            )
            node = node.then(out[-1])
        return out
