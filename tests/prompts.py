"""Prompts for tests: each like no other, or some that begin alike."""

VOCAB_SIZE = 61


def make_prompt(number: int, length: int, *, num_alike: int = 0) -> list[int]:
    """The ``number``-th prompt. Its first ``num_alike`` tokens are those of every such prompt."""
    alike = [(i * i + 5) % VOCAB_SIZE for i in range(min(num_alike, length))]
    own = [(number * 7 + i * (number + 3)) % VOCAB_SIZE for i in range(len(alike), length)]
    return alike + own
