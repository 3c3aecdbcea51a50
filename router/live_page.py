"""The live page at ``/``: files of this package, and the JSON that they are fed with.

The page is for everybody who reaches the port; its data is for operators, as ``/admin/…`` is. It
holds what ``/admin/status`` tells, numbers of the last minutes and how recent requests went: ids,
lengths and stages, never a text.
"""

import asyncio
from importlib import resources

from fastapi import FastAPI
from fastapi.responses import Response

from router.answer_format import Json
from router.recent import SAMPLE_PERIOD_S, Sample
from router.record import RequestRecord
from router.service import Service

FILES = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "source.js": "text/javascript; charset=utf-8",
    "nodes.js": "text/javascript; charset=utf-8",
    "requests.js": "text/javascript; charset=utf-8",
    "figures.js": "text/javascript; charset=utf-8",
}
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def add_live_routes(app: FastAPI, service: Service) -> None:
    directory = resources.files("router") / "live"
    page = (directory / "index.html").read_bytes()
    files = {name: (directory / name).read_bytes() for name in FILES}

    @app.get("/", include_in_schema=False)
    async def live_page() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=HEADERS)

    @app.get("/live/{name}", include_in_schema=False)
    async def live_file(name: str) -> Response:
        if name not in files:
            return Response(status_code=404)
        return Response(files[name], media_type=FILES[name], headers=HEADERS)

    @app.get("/admin/live", include_in_schema=False)
    async def live_data(requests_since: int = 0, samples_since: int = 0) -> Json:
        return live(service, requests_since=requests_since, samples_since=samples_since)


async def keep_samples(service: Service) -> None:
    """Note how things stand once a second, for ever."""
    metrics = service.metrics
    while True:
        queues = service.dispatcher.queues().queues
        sample = Sample(
            at_s=service.clock.now_s(),
            requests=service.dispatcher.num_running,
            queued=sum(queue.num_waiting for queue in queues),
            ended=metrics.num_ended,
            prompt_tokens=metrics.num_prompt_tokens,
            generation_tokens=metrics.num_generation_tokens,
        )
        metrics.samples.add(sample)
        await asyncio.sleep(SAMPLE_PERIOD_S)


def live(service: Service, *, requests_since: int, samples_since: int) -> Json:
    """What is so now, and what is new since the numbers of the last answer."""
    now_s = service.clock.now_s()
    metrics = service.metrics
    return {
        **service.status(),
        "headroom_blocks": service.dispatcher.blocks_left(),
        "refused": sum(service.dispatcher.queues().refused.values()),
        "retries": metrics.num_retries,
        "last_request": metrics.recent.last,
        "recent": [
            _request(number, record, now_s)
            for number, record in metrics.recent.since(requests_since)
        ],
        "last_sample": metrics.samples.last,
        "samples": [
            [round(now_s - sample.at_s, 1), *_numbers(sample)]
            for _, sample in metrics.samples.since(samples_since)
        ],
    }


def _numbers(sample: Sample) -> list[int]:
    totals = [sample.ended, sample.prompt_tokens, sample.generation_tokens]
    return [sample.requests, sample.queued, *totals]


def _request(number: int, record: RequestRecord, now_s: float) -> Json:
    timeline = record.timeline
    return {
        "number": number,
        "id": record.request_id,
        "age_s": round(now_s - record.ended_s, 3),
        "ttft_s": record.ttft_s,
        "latency_s": record.latency_s,
        "prompt_tokens": record.num_prompt_tokens,
        "output_tokens": record.num_output_tokens,
        "choices": record.num_choices,
        "attempts": record.num_attempts,
        "planned": record.planned and record.planned.value,
        "route": timeline and timeline.route.value,
        "stages": [[s.name, s.node, s.duration_s] for s in timeline.stages] if timeline else [],
        "kv_bytes": timeline.kv_bytes if timeline else 0,
        "transport": timeline and timeline.transport,
        "cached_tokens": timeline.cached_tokens if timeline else 0,
        "preemptions": timeline.num_preemptions if timeline else 0,
        "error": record.error,
    }
