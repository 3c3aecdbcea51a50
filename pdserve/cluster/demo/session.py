"""The demo itself: a cluster of its own, three questions, what came of them, and its end."""

import asyncio
import time
from dataclasses import replace

from pdserve.cluster.addresses import is_free
from pdserve.cluster.console import Console
from pdserve.cluster.demo import grpc_client, http_client
from pdserve.cluster.demo.answer import problems, stage_table
from pdserve.cluster.demo.questions import questions
from pdserve.cluster.launch import Cluster, OpenedSite, opened_site, start_cluster
from pdserve.cluster.signal_watch import watched_signals
from pdserve.cluster.signals import (
    StopRequestedError,
    caught_signals,
    terminating_as_interrupt,
    unless,
)
from pdserve.core.config import ClusterConfig

INTERRUPTED = 130
GRACE_S = 0.0  # all answers are in, or nobody waits for them any more


def demonstrate(config: ClusterConfig, console: Console) -> int:
    """Run the demo; the exit status. Main thread only."""
    began_s = time.monotonic()
    config = _free_ports(config, console)
    try:
        with (
            terminating_as_interrupt(),
            watched_signals() as watch,
            opened_site(config, None, console.say, watch) as opened,
        ):
            status = asyncio.run(_demonstrate(opened, console))
    except KeyboardInterrupt:
        status = INTERRUPTED
    console.say("stopped", "nothing runs any more")
    console.say("demo", f"{_word(status)} after {time.monotonic() - began_s:.0f} s")
    return status


async def _demonstrate(opened: OpenedSite, console: Console) -> int:
    with caught_signals() as signals:
        try:
            cluster = await unless(signals.first, start_cluster(opened, console.say))
        except StopRequestedError:
            return INTERRUPTED
        try:
            num_wrong = await unless(signals.first, _ask_all(opened, cluster, console))
        except StopRequestedError:
            return INTERRUPTED
        finally:
            await cluster.close(GRACE_S)
    return 1 if num_wrong else 0


async def _ask_all(opened: OpenedSite, cluster: Cluster, console: Console) -> int:
    """Ask one after the other; how many answers were not as expected."""
    model = opened.site.cluster.config.model.name
    num_wrong = 0
    for i, question in enumerate(questions()):
        over_grpc = i == len(questions()) - 1
        console.line()
        console.line(f"{'gRPC' if over_grpc else 'HTTP'}> {question.shown}")
        if over_grpc:
            answer = await grpc_client.ask(cluster.router.grpc, question.content, console.piece)
        else:
            url = f"http://{cluster.router.http}"
            answer = await http_client.ask(url, model, question.content, console.piece)
        console.line()
        for line in stage_table(answer):
            console.line(line)
        for problem in (found := problems(question, answer)):
            console.line(f"  WRONG: {problem}")
        num_wrong += bool(found)
    console.line()
    return num_wrong


def _free_ports(config: ClusterConfig, console: Console) -> ClusterConfig:
    """The cluster file's ports where they are free, others where they are not."""
    host = config.router.host

    def free(key: str, port: int) -> int:
        if port and not is_free(host, port):
            console.say("ports", f"{host}:{port} is taken; using another {key}")
            return 0
        return port

    router = replace(
        config.router,
        http_port=free("http_port", config.router.http_port),
        grpc_port=free("grpc_port", config.router.grpc_port),
    )
    return replace(config, router=router)


def _word(status: int) -> str:
    return {0: "three right answers", INTERRUPTED: "interrupted"}.get(status, "FAILED")
