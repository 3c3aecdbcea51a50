"""``pdserve bench soak``: a cluster under mixed load, one of its processes killed now and then.

Reports what came of every request, and whether anything grew.

The load: greedy and seeded requests, streamed and whole, some whose client leaves, some nonsense.
Answers are compared with those of the undisturbed cluster, token for token. Exit status 1 where an
answer was wrong, a request hung, or failed although a decode node was ready, a block or a process
was left over, or memory or file handles grew by more than a tenth.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import httpx

from pdserve.bench.arguments import amount, whole_number
from pdserve.bench.own_cluster import Footprint, OwnCluster, own_cluster
from pdserve.bench.soak.clients import HANG_S, Clients, Tally
from pdserve.bench.soak.kills import Sightings, Watch
from pdserve.bench.soak.questions import Question, answered, drafts
from pdserve.core.errors import InternalError, NoNodeError

SETTLE_TIMEOUT_S = 60.0
EXCUSE_S = 40.0  # a request waits so long, at most, for a decode node before it fails
MOST_GROWTH = 1.1
MIB = 1 << 20

Result = dict[str, object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``pdserve bench soak``."""
    parser.add_argument("cluster_yaml", nargs="?", type=Path, help="default: all defaults")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--minutes", type=amount, default=30.0)
    parser.add_argument("--kill-every", type=amount, default=60.0, metavar="S")
    parser.add_argument("--clients", type=whole_number, default=8)
    parser.add_argument("--questions", type=whole_number, default=36)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Soak, print the result; 1 where a promise was broken."""
    log = Path(tempfile.mkdtemp(prefix="pdserve-soak-")) / "serve.log"
    settings = ["decode.replicas=2", "prefill.replicas=2", *args.set]
    sys.stderr.write(f"log: {log}\n")
    with own_cluster(args.cluster_yaml, settings, log) as cluster:
        result = asyncio.run(_soak(args, cluster))
        status, num_orphans = cluster.stop()
    result |= {"exit_status": status, "orphans": num_orphans, "log": str(log)}
    broken = broken_promises(result)
    result["broken"] = broken
    text = json.dumps(result) if args.json else "\n".join(f"{k:28}{v}" for k, v in result.items())
    sys.stdout.write(text + "\n")
    return 1 if broken else 0


def broken_promises(result: Result) -> list[str]:
    """What should be nothing, and is not."""
    broken = [
        name
        for name in ("wrong", "hangs", "failures_with_nodes_left", "leaked_blocks", "orphans")
        if result[name]
    ]
    if result["exit_status"] != 0:
        broken.append("exit_status")
    for name in ("rss_growth", "fd_growth"):
        growth = result[name]
        if isinstance(growth, float) and growth > MOST_GROWTH:
            broken.append(name)
    return broken


async def _soak(args: argparse.Namespace, cluster: OwnCluster) -> Result:
    questions = await _questions(cluster.url, args.questions, args.seed)
    clients = Clients(cluster.url, questions, args.clients, args.seed)
    watch = Watch(cluster, kill_every_s=args.kill_every, seed=args.seed)
    stop_kills, stop_asking = asyncio.Event(), asyncio.Event()
    watching = asyncio.create_task(watch.run(stop_kills))
    asking = asyncio.create_task(clients.run(stop_asking))
    began_s = time.monotonic()
    await asyncio.sleep(args.minutes * 60)  # the soak itself
    stop_asking.set()
    async with asyncio.timeout(HANG_S * 2):
        await asking
    stop_kills.set()
    await watching
    leaked = await asyncio.to_thread(_leaked_blocks, cluster)
    return {
        "seconds": round(time.monotonic() - began_s, 1),
        "questions": len(questions),
        **_counted(clients.tally, watch.seen),
        "leaked_blocks": leaked,
        **growth(watch.seen.footprints),
    }


async def _questions(url: str, count: int, seed: int) -> list[Question]:
    async with httpx.AsyncClient(base_url=url, timeout=HANG_S, trust_env=False) as client:
        models = (await client.get("/v1/models")).raise_for_status().json()
        bodies = drafts(count, models["data"][0]["id"], seed)
        asked = [await answered(client, body) for body in bodies]
    questions = [question for question in asked if question is not None]
    if not questions:
        raise InternalError("no question has an answer that is clear enough; ask more of them")
    return questions


def _counted(tally: Tally, seen: Sightings) -> Result:
    unexcused = [
        name
        for time_s, name in tally.failures
        if not seen.had_no_decode_node(time_s - EXCUSE_S, time_s)
    ]
    return {
        "requests": sum(tally.done.values()) + len(tally.failures),
        "done": dict(tally.done),
        "failures": dict(Counter(name for _, name in tally.failures)),
        "failures_with_nodes_left": dict(Counter(unexcused)),
        "wrong": tally.wrong,
        "hangs": tally.hangs,
        "longest_s": round(tally.longest_s, 1),
        "kills": dict(Counter(f"{v.node} {v.part}" for _, v in seen.kills)),
        "recoveries_s": [round(each, 1) for each in seen.recoveries_s],
    }


def growth(footprints: Sequence[Footprint]) -> Result:
    """The last quarter's median beside the second's, in which all is warm; None: too few looks."""
    quarter = len(footprints) // 4
    if not quarter:
        return {"rss_growth": None, "fd_growth": None}
    early, late = footprints[quarter : 2 * quarter], footprints[-quarter:]

    def grew(amount: Callable[[Footprint], float]) -> float:
        return round(median(map(amount, late)) / median(map(amount, early)), 3)

    return {
        "rss_mib": round(median(each.rss_bytes for each in late) / MIB),
        "rss_growth": grew(lambda each: each.rss_bytes),
        "fd_growth": grew(lambda each: each.num_fds),
    }


def _leaked_blocks(cluster: OwnCluster) -> dict[str, int]:
    """Blocks that are still taken a minute after the last request, by node."""
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    taken = {"router": -1}
    while taken and time.monotonic() < deadline_s:
        time.sleep(1.0)  # nodes report once a second
        try:
            nodes = cluster.status()["nodes"]
        except NoNodeError:
            continue
        taken = {
            node["name"]: (node["total_blocks"] or 0) - (node["free_blocks"] or 0)
            for node in nodes
            if not node["ready"] or node["total_blocks"] != node["free_blocks"]
        }
    return taken
