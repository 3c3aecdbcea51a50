"""What a node is told when it starts, and how others find it.

A node is one TP group with its front. Each start of a node is another *incarnation*, and so is its
life in another role: the id names the node to peers, so that nothing of an incarnation that is over
can be taken for the living one's. The name stays, and does not tell the role.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from pdserve.core.config import DecodeConfig, KvTransferConfig, PrefillConfig
from pdserve.core.model_spec import ModelSpec
from pdserve.core.observability_config import ObservabilityConfig


class Role(StrEnum):
    """What a node is for."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAddress:
    """Where a node's gRPC server listens."""

    name: str
    role: Role
    incarnation: str
    address: str  # host:port
    metrics_address: str | None = None  # where its own numbers are scraped, if anywhere


class Standing(StrEnum):
    """How the one who keeps a node running sees it."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"  # it finishes what it holds, and gets nothing new
    SWITCHING = "switching"  # to its role: it holds nothing, and serves again in a moment
    LOST = "lost"  # it ended, and is made anew after a while


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStanding:
    """One node that there is to be. ``address`` is that of the incarnation that runs, if any."""

    name: str
    role: Role
    standing: Standing
    reason: str | None = None  # of a loss
    address: NodeAddress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """Everything a front needs. ``pool`` is the pool's section of the cluster file.

    ``transport`` is never ``auto`` here. ``max_model_len`` bounds prompt and output of one
    sequence;
    None: the model's own bound. Either way the node's KV cache bounds it too.
    """

    name: str
    role: Role
    incarnation: str
    host: str
    port_range: tuple[int, int] | None
    model: ModelSpec
    dtype: str
    kv_dtype: str
    block_size: int
    max_model_len: int | None
    pool: PrefillConfig | DecodeConfig
    kv_transfer: KvTransferConfig
    transport: str
    depth: int  # steps in flight
    model_dir: Path | None = None  # for the tokenizer, which grammars need; None: no grammars
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
