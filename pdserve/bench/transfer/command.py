"""``pdserve bench transfer``: how fast KV goes from a node to another, by size.

Two processes of this host, with a cache and a KV endpoint for each rank of their nodes, and
nothing else; each row is a prompt's KV, from the word that it is computed to the receiver's word
that it is in its blocks, and to the sender's that it knows, whatever the transport does in between;
and then several prompts at once, for the rate that the transport keeps up. Blocks lie in random
order.
Between two GPUs the rows are compared with one large copy between them. Without GPUs, use a small
shape: ``--transport grpc --device cpu --layers 4 --kv-heads 2``.
"""

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass

import torch

from pdserve.bench.arguments import whole_number, whole_numbers
from pdserve.bench.transfer.ceiling import link_bytes_per_s
from pdserve.bench.transfer.node import NodeSetting
from pdserve.bench.transfer.pair import Pair, connected_pair
from pdserve.core.config import KvTransferConfig
from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import DTYPE_BYTES, KvLayout

TRANSPORTS = ("grpc", "gloo", "nccl", "cuda_ipc")
WARM_ROUNDS = 2
IN_A_ROW = 8  # prompts
ROOM = 1.25  # blocks of a cache for each of the largest prompt, so that their order is random


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One size: until the KV is there, in medians. ``of_link``: the share of one large copy's rate.

    ``row_gb_per_s``: of ``IN_A_ROW`` prompts that are pushed at once.
    """

    tokens: int
    mib: float
    ms: float
    ms_p90: float
    acknowledged_ms: float
    gb_per_s: float
    row_gb_per_s: float
    of_link: float | None
    is_same: bool | None  # None: heads have replicas, the sums differ


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``pdserve bench transfer``; the shape is Llama-3-8B's."""
    parser.add_argument("--transport", choices=TRANSPORTS, default="grpc")
    parser.add_argument("--device", default="cpu", help="of the sender's ranks: cpu, cuda:0,cuda:1")
    parser.add_argument("--to-device", help="of the receiver's ranks; default: the same")
    parser.add_argument("--tp", type=whole_number, default=1, help="ranks of the sender")
    parser.add_argument("--to-tp", type=whole_number, help="of the receiver; default: the same")
    parser.add_argument("--tokens", type=whole_numbers, default=(16, 128, 512, 2048, 8000))
    parser.add_argument("--layers", type=whole_number, default=32)
    parser.add_argument("--kv-heads", type=whole_number, default=8)
    parser.add_argument("--head-size", type=whole_number, default=128)
    parser.add_argument("--block-size", type=whole_number, default=16)
    parser.add_argument("--to-block-size", type=whole_number, help="default: the same")
    parser.add_argument("--dtype", choices=sorted(DTYPE_BYTES), default="bfloat16")
    parser.add_argument("--frame-bytes", type=int, help="kv_transfer.frame_bytes")
    parser.add_argument("--staging-bytes", type=int, help="kv_transfer.staging_bytes")
    parser.add_argument("--nccl-channels", type=int, help="kv_transfer.nccl_channels")
    parser.add_argument("--rounds", type=whole_number, default=20, help="medians of so many")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 where other bytes came than were sent. Raises ConfigError."""
    sender = _setting(args, "sender")
    receiver = _setting(args, "receiver")
    with connected_pair(sender, receiver) as pair:
        ceiling = link_bytes_per_s(sender.devices[0], receiver.devices[0])
        comparable = all(
            setting.layout.tp_size <= setting.layout.num_kv_heads for setting in (sender, receiver)
        )
        out = sys.stderr if args.json else sys.stdout
        print(HEADER, file=out, flush=True)
        rows = []
        for num_tokens in args.tokens:
            rows.append(_measure(pair, num_tokens, args.rounds, ceiling, comparable))
            print(_line(rows[-1]), file=out, flush=True)
    if ceiling is not None:
        print(f"one large copy between the two: {ceiling / 1e9:.0f} GB/s", file=out)
    if args.json:
        found = {
            "transport": args.transport,
            "link_gb_per_s": None if ceiling is None else round(ceiling / 1e9, 1),
            "rows": [asdict(row) for row in rows],
        }
        sys.stdout.write(json.dumps(found) + "\n")
    return 1 if any(row.is_same is False for row in rows) else 0


HEADER = (
    f"{'tokens':>8}{'MiB':>10}{'ms':>10}{'p90':>10}{'known':>10}{'GB/s':>8}"
    f"{f'x {IN_A_ROW}':>8}{'of link':>9}  bytes"
)


def _measure(
    pair: Pair, num_tokens: int, rounds: int, ceiling: float | None, comparable: bool
) -> Row:
    moved = [pair.move(num_tokens) for _ in range(WARM_ROUNDS + rounds)][WARM_ROUNDS:]
    times_s, num_bytes = sorted(one.there_s for one in moved), moved[0].num_bytes
    median_s = statistics.median(times_s)
    rows = [pair.move(num_tokens, IN_A_ROW) for _ in range(WARM_ROUNDS + -(-rounds // IN_A_ROW))]
    row_bytes_per_s = statistics.median(one.num_bytes / one.there_s for one in rows[WARM_ROUNDS:])
    bytes_per_s = num_bytes / median_s
    return Row(
        tokens=num_tokens,
        mib=round(num_bytes / (1 << 20), 3),
        ms=round(median_s * 1e3, 3),
        ms_p90=round(times_s[int(0.9 * len(times_s))] * 1e3, 3),
        acknowledged_ms=round(statistics.median(one.acknowledged_s for one in moved) * 1e3, 3),
        gb_per_s=round(bytes_per_s / 1e9, 2),
        row_gb_per_s=round(row_bytes_per_s / 1e9, 2),
        of_link=None if ceiling is None else round(row_bytes_per_s / ceiling, 3),
        is_same=pair.is_same(num_tokens) if comparable else None,
    )


def _line(row: Row) -> str:
    of_link = "-" if row.of_link is None else f"{row.of_link:.0%}"
    state = {True: "the same", False: "DIFFERENT", None: "not compared"}[row.is_same]
    return (
        f"{row.tokens:>8}{row.mib:>10.2f}{row.ms:>10.3f}{row.ms_p90:>10.3f}"
        f"{row.acknowledged_ms:>10.3f}{row.gb_per_s:>8.1f}{row.row_gb_per_s:>8.1f}{of_link:>9}"
        f"  {state}"
    )


def _setting(args: argparse.Namespace, peer_id: str) -> NodeSetting:
    is_sender = peer_id == "sender"
    tp_size = args.tp if is_sender else args.to_tp or args.tp
    block_size = args.block_size if is_sender else args.to_block_size or args.block_size
    devices = args.device if is_sender else args.to_device or args.device
    layout = KvLayout(
        num_layers=args.layers,
        num_kv_heads=args.kv_heads,
        head_size=args.head_size,
        block_size=block_size,
        dtype=args.dtype,
        tp_size=tp_size,
    )
    if not args.tokens:
        raise ConfigError("--tokens: got none")
    return NodeSetting(
        peer_id=peer_id,
        layout=layout,
        num_blocks=int(ROOM * layout.num_blocks_for(max(args.tokens))) + 1,
        devices=_devices(devices, args.transport),
        config=_config(args),
    )


def _config(args: argparse.Namespace) -> KvTransferConfig:
    return KvTransferConfig(
        transport=args.transport,
        frame_bytes=args.frame_bytes,
        staging_bytes=args.staging_bytes,
        nccl_channels=args.nccl_channels,
    )


def _devices(text: str, transport: str) -> tuple[str, ...]:
    """Raises ConfigError for what is no device, or has no such transport."""
    names = tuple(text.split(","))
    for name in names:
        try:
            kind = torch.device(name).type
        except RuntimeError as error:
            raise ConfigError(f"--device: {name!r} is none: {error}") from error
        if kind not in ("cpu", "cuda"):
            raise ConfigError(f"--device: got {name!r}, allowed are cpu and cuda:N")
        if kind != "cuda" and transport in ("nccl", "cuda_ipc"):
            raise ConfigError(f"--device: {transport} needs GPUs, got {name!r}")
    return names
