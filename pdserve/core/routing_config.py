"""The parts of the cluster file's ``router`` section that say how requests are routed."""

from dataclasses import dataclass

from pdserve.core.config_checks import above, at_least, at_most

# The names that `router.policy` may have; `router/policies/__init__.py` says where each one is.
POLICY_NAMES = ("length", "least_load", "slo", "prefix", "round_robin")

# A limit is divided by; with less than a microsecond its shares are no numbers any more.
LEAST_SLO_MS, MOST_SLO_MS = 0.001, 86_400_000  # a day


@dataclass(frozen=True, slots=True, kw_only=True)
class SloConfig:
    """What policy `slo` keeps to where a request does not say; milliseconds."""

    ttft_ms: float = 2000.0  # arrival at the nodes to first token
    tpot_ms: float = 200.0  # between two tokens, of the request and of those beside it

    def __post_init__(self) -> None:
        for key, value in (("ttft_ms", self.ttft_ms), ("tpot_ms", self.tpot_ms)):
            at_least(f"router.slo.{key}", value, LEAST_SLO_MS)
            at_most(f"router.slo.{key}", value, MOST_SLO_MS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixConfig:
    """What the router remembers of the prompts that it sent to nodes."""

    max_entries: int = 65536  # blocks remembered, the last used ones; 0: none
    block_size: int = 64  # tokens of such a block; a match is a multiple of it
    load_gap: int = 8  # policy `prefix`: requests that the node with the prefix may have more

    def __post_init__(self) -> None:
        at_least("router.prefix.max_entries", self.max_entries, 0)
        at_least("router.prefix.block_size", self.block_size, 1)
        at_least("router.prefix.load_gap", self.load_gap, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionalConfig:
    """Prefill on the decode node where predictions say that it is better; `slo` always does so."""

    enabled: bool = False
    margin: float = 0.1  # by which share the local way must be better
    max_local_tokens: int = 2048  # prompts with more uncached tokens go to prefill nodes
    max_step_ms: float | None = None  # no local chunk beside decodes whose step would take longer

    def __post_init__(self) -> None:
        at_least("router.conditional.margin", self.margin, 0)
        at_least("router.conditional.max_local_tokens", self.max_local_tokens, 1)
        if self.max_step_ms is not None:
            above("router.conditional.max_step_ms", self.max_step_ms, 0)
