"""What a node's work costs it, in seconds of its own clock; the formulas are all here.

Nodes fit the coefficients to the steps that they measure (``cost_fit.py``), the router predicts
with them, and so does whoever simulates. All coefficients are zero or more. Pure arithmetic.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """A step with a chunk of n prompt tokens after ``start`` cached ones: a + b·n + c·n·(start +
    n/2).

    The last term counts the pairs of attention: it is the same for a prompt in one chunk or many.
    """

    a: float
    b: float
    c: float

    def chunk_s(self, num_tokens: int, start: int = 0) -> float:
        """One step that computes one chunk and nothing else."""
        return self.a + self.marginal_s(num_tokens, start)

    def marginal_s(self, num_tokens: int, start: int = 0) -> float:
        """What a chunk adds to a step that runs anyway."""
        return self.b * num_tokens + self.c * attended(num_tokens, start)

    def prompt_s(self, num_tokens: int, chunk_len: int, start: int = 0) -> float:
        """All steps of the last ``num_tokens`` of a prompt; see ``num_steps``."""
        return self.a * num_steps(num_tokens, chunk_len) + self.marginal_s(num_tokens, start)

    def queue_s(self, num_tokens: int, chunk_len: int) -> float:
        """Prompts that wait, of which only the sum is known.

        Each chunk is taken for a prompt of its own: for long ones this is too little by what their
        chunks attend to before themselves. ``chunk_len`` 0: all in one step.
        """
        chunk_len = chunk_len or max(num_tokens, 1)
        whole, rest = divmod(num_tokens, chunk_len)
        return whole * self.chunk_s(chunk_len) + (self.chunk_s(rest) if rest else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCost:
    """A step that gives a token to each of S sequences with C tokens of context in all:
    a + b·S + c·C.
    """

    a: float
    b: float
    c: float

    def step_s(self, num_sequences: int, context_tokens: int) -> float:
        return self.a + self.marginal_s(num_sequences, context_tokens)

    def marginal_s(self, num_sequences: int, context_tokens: int) -> float:
        """What the sequences add to a step that runs anyway."""
        return self.b * num_sequences + self.c * context_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """KV from one node to another: latency + bytes · s_per_byte. ``token_bytes``: KV of a token."""

    latency_s: float
    s_per_byte: float
    token_bytes: int

    def tokens_s(self, num_tokens: int) -> float:
        """To move the KV of so many tokens, with nothing else on the link."""
        if num_tokens <= 0:
            return 0.0
        return self.latency_s + self.s_per_byte * self.token_bytes * num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCosts:
    """All that one node knows of its costs; None: it has measured nothing of the kind."""

    prefill: PrefillCost | None = None
    decode: DecodeCost | None = None
    link: LinkCost | None = None  # of a prefill node, which sends


def attended(num_tokens: int, start: int) -> float:
    """Pairs of positions in the attention of a chunk, up to half a pair a token."""
    return num_tokens * (start + num_tokens / 2)


def num_steps(num_tokens: int, chunk_len: int) -> int:
    """Steps that so many prompt tokens take, at most ``chunk_len`` in each; 0: all in one."""
    return -(-num_tokens // (chunk_len or max(num_tokens, 1)))
