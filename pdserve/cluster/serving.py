"""Runs a cluster until signals end it, and says what happens: the body of `pdserve serve`."""

import asyncio
import shlex
import time

from pdserve.cluster.console import Console
from pdserve.cluster.launch import Cluster, OpenedSite, opened_site, start_cluster
from pdserve.cluster.ray_head import RayHead
from pdserve.cluster.signal_watch import watched_signals
from pdserve.cluster.signals import (
    StopRequestedError,
    StopSignals,
    caught_signals,
    terminating_as_interrupt,
    unless,
)
from pdserve.core.config import ClusterConfig
from pdserve.core.errors import RayLostError
from pdserve.core.security_config import SecurityConfig


def serve(config: ClusterConfig, name: str | None, grace_s: float, console: Console) -> int:
    """Serve until a signal; 0 when all has ended in order. Main thread only."""
    began_s = time.monotonic()
    try:
        with (
            terminating_as_interrupt(),
            watched_signals() as watch,
            opened_site(config, name, console.say, watch) as opened,
        ):
            asyncio.run(_serve(opened, grace_s, console, began_s))
    except KeyboardInterrupt:  # where no loop catches signals: before it serves, or for good
        pass
    console.say("stopped", "nothing runs any more")
    return 0


async def _serve(opened: OpenedSite, grace_s: float, console: Console, began_s: float) -> None:
    """Raises RayLostError where Ray is gone before a signal has come; all has ended then."""
    with caught_signals() as signals:
        watching = asyncio.create_task(_watch_ray(opened.head, signals))
        try:
            cluster = await unless(signals.first, start_cluster(opened, console.say))
            _say_where(opened, cluster, console, time.monotonic() - began_s)
            await signals.first.wait()
            if watching.done():
                console.say("stopping", "Ray is gone, and everything ends with it")
                await close(cluster, 0.0, signals)
            else:
                text = f"requests may finish for {grace_s:g} s; again: stop at once"
                console.say("stopping", text)
                await close(cluster, grace_s, signals)
        except StopRequestedError:
            pass
        finally:
            watching.cancel()
    if watching.done() and not watching.cancelled():
        raise watching.result()


async def _watch_ray(head: RayHead, signals: StopSignals) -> RayLostError:
    """The loss of Ray is as good as a signal; two, where nothing is left to be ended in order."""
    error = await head.lost()
    if head.end():
        signals.second.set()
    signals.first.set()
    return error


async def close(cluster: Cluster, grace_s: float, signals: StopSignals) -> None:
    """Close in order, or at once where a second signal comes."""
    try:
        await unless(signals.second, cluster.close(grace_s))
    except StopRequestedError:
        await cluster.kill()


def curl_lines(url: str, body: str, *, security: SecurityConfig, has_keys: bool) -> list[str]:
    """A command that gets an answer of this server, with what TLS and API keys want."""
    wanted = []
    if security.tls_certificate is not None:
        wanted.append(f"--cacert {shlex.quote(security.tls_certificate)}")
    if has_keys:
        wanted.append('-H "Authorization: Bearer $PDSERVE_API_KEY"')
    return [
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\",
        *(f"     {each} \\" for each in wanted),
        f"     -d '{body}'",
    ]


def _say_where(opened: OpenedSite, cluster: Cluster, console: Console, took_s: float) -> None:
    config = opened.site.cluster.config
    url, model = f"{config.security.scheme}://{cluster.router.http}", config.model.name
    console.say("ready", f"after {took_s:.1f} s; Ctrl-C stops it. Try")
    question = '"messages": [{"role": "user", "content": "What is the capital of France?"}]'
    body = f'{{"model": "{model}", {question}, "max_tokens": 64, "temperature": 0}}'
    for line in curl_lines(url, body, security=config.security, has_keys=opened.has_keys):
        console.line(f"  {line}")
    console.line(f"  pdserve status --name {opened.claim.name}")
