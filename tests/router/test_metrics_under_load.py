"""A scrape during load agrees with what the load generator saw."""

import asyncio
from collections import Counter

import pytest

from pdserve.bench.load import Outcome, Target, run_load
from pdserve.bench.workload import Arrival
from pdserve.core.request import FinishReason, Request
from router.metrics import TTFT_BOUNDS_S
from tests.router.conftest import WAIT_S, World, WorldMaker
from tests.router.fake_nodes import FakeDecodeNode, FakeSession, answer
from tests.telemetry.scrape import Scrape, problems

NUM_REQUESTS, OUTPUT_LEN = 40, 6
DELAY_S = 0.2  # of each first token: above one bound and below the next
COUNTERS = (
    "e2e_request_latency_seconds_count",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "generation_tokens_total",
    "prompt_tokens_total",
)


async def slow_to_begin(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    await asyncio.sleep(DELAY_S)
    await answer(node, session, request)


async def scrape(world: World) -> Scrape:
    text = (await world.http.get("/metrics")).text
    assert problems(text) == []
    return Scrape(text)


async def load(world: World) -> tuple[list[Outcome], list[Scrape]]:
    """All outcomes, and scrapes taken while they came."""
    workload = [
        Arrival(index=i, arrival_s=0.01 * i, prompt_len=20 + i, output_len=OUTPUT_LEN)
        for i in range(NUM_REQUESTS)
    ]
    url = str(world.http.base_url)
    loading = asyncio.create_task(run_load(Target(url=url, model="tiny", vocab_size=60), workload))
    scrapes = []
    while not loading.done():
        scrapes.append(await scrape(world))
        await asyncio.wait({loading}, timeout=0.05)
    await world.until_idle()
    return await loading, [*scrapes, await scrape(world)]


@pytest.fixture
async def world(make_world: WorldMaker):
    async with make_world(num_decode=2, num_prefill=1, local_prefill_below=30) as world:
        for node in world.decode:
            node.behave = slow_to_begin
            node.token_time_s = 0.01
        yield world


async def test_a_scrape_during_load_agrees_with_what_the_load_generator_saw(world: World) -> None:
    outcomes, scrapes = await load(world)
    assert not [outcome.error for outcome in outcomes if outcome.error]
    seen = scrapes[-1]
    assert seen.value("e2e_request_latency_seconds_count") == NUM_REQUESTS
    assert seen.value("request_success_total", finished_reason="length") == NUM_REQUESTS
    assert seen.value("request_success_total") == NUM_REQUESTS
    num_tokens = sum(outcome.num_tokens for outcome in outcomes)
    assert seen.value("generation_tokens_total") == num_tokens == NUM_REQUESTS * OUTPUT_LEN
    num_prompt = sum(outcome.arrival.prompt_len for outcome in outcomes)
    assert seen.value("prompt_tokens_total") == num_prompt
    assert seen.value("inter_token_latency_seconds_count") == num_tokens - NUM_REQUESTS
    lengths = Counter(outcome.arrival.prompt_len < 30 for outcome in outcomes)
    assert seen.value("routes_total", route="local") == lengths[True]
    assert seen.value("routes_total", route="disaggregated") == lengths[False]
    assert seen.value("router_requests") == 0


async def test_a_scrape_tells_what_is_in_work_before_it_is_done(world: World) -> None:
    done = asyncio.Event()

    async def held(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
        await done.wait()
        await answer(node, session, request)

    for node in world.decode:
        node.behave = held
    loading = asyncio.create_task(load(world))
    async with asyncio.timeout(WAIT_S):
        while (seen := await scrape(world)).value("router_requests") < NUM_REQUESTS:
            await asyncio.sleep(0.01)
    assert seen.value("prompt_tokens_total") == sum(range(20, 20 + NUM_REQUESTS))
    assert seen.value("time_to_first_token_seconds_count") == 0
    assert seen.value("e2e_request_latency_seconds_count") == 0
    done.set()
    _, scrapes = await loading
    for name in COUNTERS:
        values = [scrape.value(name) for scrape in scrapes]
        assert values == sorted(values)
        assert values[-1] > 0


async def test_first_tokens_are_counted_where_the_load_generator_saw_them(world: World) -> None:
    """Each lies between the delay that was scripted and the time that its client measured."""
    outcomes, scrapes = await load(world)
    buckets = dict(scrapes[-1].buckets("time_to_first_token_seconds"))
    ttfts = [outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None]
    assert len(ttfts) == NUM_REQUESTS == buckets[float("inf")]
    for bound in TTFT_BOUNDS_S:
        assert buckets[bound] >= sum(ttft <= bound for ttft in ttfts)
        assert bound > DELAY_S or buckets[bound] == 0
    total_s = scrapes[-1].value("time_to_first_token_seconds_sum")
    assert NUM_REQUESTS * DELAY_S <= total_s <= sum(ttfts)


@pytest.mark.parametrize("num_over", [0, 1])
async def test_each_choice_whose_client_left_counts_once(
    make_world: WorldMaker, num_over: int
) -> None:
    async def end_some(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
        for choice in range(num_over):
            session.say(request, choice, 0, [5], finish=FinishReason.STOP)

    async with make_world() as world:
        world.decode[0].behave = end_some
        call = asyncio.create_task(world.complete(max_tokens=100, n=3))
        await world.decode[0].arrivals.get()
        async with asyncio.timeout(WAIT_S):
            while (await scrape(world)).value("generation_tokens_total") < num_over:
                await asyncio.sleep(0.01)
        call.cancel()
        await world.until_idle()
        seen = await scrape(world)
    assert seen.value("request_success_total", finished_reason="abort") == 3 - num_over
    assert seen.value("request_success_total", finished_reason="stop") == num_over
