"""One request's spans, from the client's own to those of router, decode node and prefill node."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.core.config import RouterConfig
from pdserve.core.errors import ConfigError
from pdserve.telemetry import traces
from pdserve.telemetry.traces import Tracer, make_tracer
from tests.nodes.site import Site
from tests.nodes.test_behind_a_router import ask, router_of
from tests.telemetry.otlp_receiver import OtlpReceiver, Received
from tests.text.tiny_models import byte_level, save

TRACE_ID, CLIENT_SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{CLIENT_SPAN_ID}-01"
UNSAMPLED = f"00-{TRACE_ID}-{CLIENT_SPAN_ID}-00"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "tiny", byte_level())


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        yield receiver


class Tracers:
    """One for each process, as the processes of a cluster have them."""

    def __init__(self) -> None:
        self.made: dict[str, Tracer] = {}

    def __getitem__(self, process: str) -> Tracer:
        return self.made.setdefault(process, make_tracer(process))

    async def close(self) -> None:
        for tracer in self.made.values():
            await asyncio.to_thread(tracer.close)


async def trace_of(
    receiver: OtlpReceiver, model_dir: Path, *, local: bool = False, **headers: str
) -> list[Received]:
    """What is told of one request."""
    tracers = Tracers()
    async with Site() as site:
        await site.start_decode(tracer=tracers["decode-0"])
        address = await site.start_prefill("p0", tracer=tracers["p0"])
        site.decode.set_prefill_nodes((address,))
        below = 1000 if local else 0
        config = RouterConfig(http_port=0, grpc_port=0, local_prefill_below=below)
        async with router_of(site, model_dir, config, tracers["router"]) as client:
            client.headers.update(headers)
            answer = await ask(client, max_tokens=5)
            assert answer.status_code == 200
    await tracers.close()
    return receiver.spans


def one(spans: list[Received], name: str) -> Received:
    (span,) = [span for span in spans if span.name == name]
    return span


def children(spans: list[Received], parent: Received) -> list[str]:
    of = [span for span in spans if span.parent_id == parent.span_id]
    # A stage may take no time: of two that end together the one that was told first is first.
    return [span.name for span in sorted(of, key=lambda span: span.end_ns)]


async def test_the_spans_of_a_request_are_linked_across_router_decode_and_prefill(
    receiver: OtlpReceiver, model_dir: Path
) -> None:
    spans = await trace_of(receiver, model_dir, traceparent=TRACEPARENT)
    assert {span.trace_id for span in spans} == {TRACE_ID}
    assert {span.service for span in spans} == {"pdserve"}
    router, decode, prefill = (one(spans, n) for n in ("router", "decode_node", "prefill_node"))
    assert router.parent_id == CLIENT_SPAN_ID
    assert (decode.parent_id, prefill.parent_id) == (router.span_id, decode.span_id)
    assert [span.process for span in (router, decode, prefill)] == ["router", "decode-0", "p0"]
    assert len({span.attributes["pdserve.request_id"] for span in (router, decode, prefill)}) == 1
    assert router.attributes["pdserve.route"] == "disaggregated"
    assert router.attributes["gen_ai.usage.output_tokens"] == 5
    assert not any(span.is_error for span in spans)


async def test_the_stages_of_the_timeline_are_spans_of_the_process_that_did_them(
    receiver: OtlpReceiver, model_dir: Path
) -> None:
    spans = await trace_of(receiver, model_dir)
    router, decode, prefill = (one(spans, n) for n in ("router", "decode_node", "prefill_node"))
    assert router.parent_id == ""
    assert children(spans, router)[:2] == ["admission", "router_queue"]
    assert set(children(spans, router)[2:]) == {"decode_node", "streaming"}
    own = [name for name in children(spans, decode) if name != "prefill_node"]
    assert own == ["reserve", "transfer", "decode_queue", "first_decode"]
    assert children(spans, prefill) == ["prefill_queue", "prefill"]
    for span in spans:
        assert span.start_ns <= span.end_ns
        parents = [parent for parent in spans if parent.span_id == span.parent_id]
        slack_ns = 5_000_000  # two readings of two clocks for each time
        assert all(parent.start_ns <= span.start_ns + slack_ns for parent in parents)


async def test_a_local_prefill_is_a_stage_of_the_decode_node(
    receiver: OtlpReceiver, model_dir: Path
) -> None:
    spans = await trace_of(receiver, model_dir, local=True)
    assert one(spans, "router").attributes["pdserve.route"] == "local"
    expected = ["reserve", "prefill", "decode_queue", "first_decode"]
    assert children(spans, one(spans, "decode_node")) == expected


async def test_what_the_client_does_not_sample_is_not_sent(
    receiver: OtlpReceiver, model_dir: Path
) -> None:
    assert await trace_of(receiver, model_dir, traceparent=UNSAMPLED) == []


@pytest.mark.parametrize("traceparent", ["", "nonsense", "00-0-0-01", "ff-" + TRACEPARENT[3:]])
async def test_a_traceparent_that_is_none_begins_a_trace_of_its_own(
    receiver: OtlpReceiver, model_dir: Path, traceparent: str
) -> None:
    spans = await trace_of(receiver, model_dir, traceparent=traceparent)
    assert one(spans, "router").parent_id == ""
    assert len({span.trace_id for span in spans}) == 1


def test_without_the_packages_the_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(traces.TRACERS, "otel", "pdserve.telemetry.no_such_file:start")
    with pytest.raises(ConfigError, match=r"observability\.tracing: .*pdserve\[otel\]"):
        make_tracer("router")


def test_an_unknown_protocol_is_refused_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL: got 'carrier-pigeon'"):
        make_tracer("router")


def test_nothing_of_the_tracer_is_imported_where_nothing_is_traced() -> None:
    code = (
        "import sys, router.server, decode_node.server, prefill_node.server\n"
        "assert not [m for m in sys.modules if m.startswith('opentelemetry.sdk')]\n"
        "assert 'pdserve.telemetry.otel_tracer' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
