"""The live page in a real browser, at desktop and phone width, in both themes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pdserve.core.api_keys import hashed, new_key
from pdserve.core.request import FinishReason, Request, RouteTaken
from pdserve.core.timeline import Stage, Timeline
from pdserve.rpc import convert
from pdserve.rpc.v1 import session_pb2
from tests.browser import CHROMIUM, Page, browser
from tests.router.conftest import World, WorldMaker
from tests.router.fake_nodes import FakeDecodeNode, FakeSession

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH"),
    pytest.mark.timeout(300),
]

DESKTOP, PHONE = (1280, 900), (360, 780)
LIVE = "document.getElementById('live')?.hidden === false"
NUM_ROWS = "document.querySelectorAll('#requests li').length"

# Every text that is seen, with its contrast to what is behind it (WCAG 2.2, 1.4.3).
CONTRASTS = """
(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (at) => {
    for (; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.length === 3 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const at of document.body.querySelectorAll('*')) {
    const own = [...at.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !at.checkVisibility() || at.closest('.hidden, .skip, noscript')) continue;
    const [a, b] = [luminance(parse(getComputedStyle(at).color)), luminance(behind(at))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found.push([ratio, at.textContent.trim().slice(0, 30)]);
  }
  return found;
})()
"""
# What sticks out of the page to the right, or is cut off.
OVERFLOWS = """
[...document.body.querySelectorAll('*')]
  .filter((at) => at.checkVisibility() && !at.closest('.hidden, .skip, .waterfall, svg'))
  .filter((at) => at.getBoundingClientRect().right > innerWidth + 1)
  .map((at) => at.outerHTML.slice(0, 80))
"""


async def staged(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    """Three tokens after every stage that there is."""
    prefill = request.route.prefill_nodes[:1]
    where = (prefill or (node.name,))[0]
    times = {"reserve": 0.0004, "prefill_queue": 0.002, "prefill": 0.015, "transfer": 0.003}
    times |= {"decode_queue": 0.0003, "first_decode": 0.002}
    names = times if prefill else ["reserve", "prefill", "decode_queue", "first_decode"]
    timeline = Timeline(
        route=RouteTaken.DISAGGREGATED if prefill else RouteTaken.LOCAL,
        stages=tuple(
            Stage(name=name, node=where if "prefill" in name else node.name, duration_s=times[name])
            for name in names
        ),
        kv_bytes=(1 << 20) * len(prefill),
        transport="grpc" if prefill else None,
    )
    message = session_pb2.RequestTimeline(
        request_id=request.request_id,
        attempt=request.attempt,
        timeline=convert.timeline_to_proto(timeline),
    )
    outputs = session_pb2.StepOutputs(timelines=[message])
    session.outbox.put(session_pb2.DecodeMessage(outputs=outputs))
    for index in range(3):
        await asyncio.sleep(0.015)
        session.say(request, 0, index, [index], finish=FinishReason.LENGTH if index == 2 else None)


@asynccontextmanager
async def shown(
    make_world: WorldMaker, *, size: tuple[int, int] = DESKTOP, dark: bool = False
) -> AsyncIterator[tuple[World, Page]]:
    """A cluster that has answered a few requests, and its page."""
    async with make_world(num_decode=2, num_prefill=2, local_prefill_below=8) as world:
        for node in world.decode:
            node.behave = staged
        for prompt in ("Hello", "Hello, this is a longer prompt " * 3) * 3:
            await world.complete(prompt=prompt, max_tokens=3)
        async with browser() as page:
            width, height = size
            await page.open(str(world.http.base_url) + "/", width=width, height=height, dark=dark)
            await page.until(f"{LIVE} && {NUM_ROWS} === 6")
            yield world, page
            assert page.problems == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
async def test_everything_is_read_and_nothing_sticks_out(
    make_world: WorldMaker, size: tuple[int, int], dark: bool, tmp_path: Path
) -> None:
    async with shown(make_world, size=size, dark=dark) as (world, page):
        await page.value("document.querySelector('#requests summary').click()")
        await page.screenshot(tmp_path / "page.png")
        assert await page.value(OVERFLOWS) == []
        contrasts = await page.value(CONTRASTS)
        assert len(contrasts) > 60
        assert [text for ratio, text in contrasts if ratio < 4.5] == []
        base = str(world.http.base_url)
        assert all(url.startswith((base, "data:")) for url in page.requested)


async def test_pools_queues_routes_and_stages_are_there(make_world: WorldMaker) -> None:
    async with shown(make_world) as (_, page):
        text = await page.value("document.body.innerText")
        for word in ("ready", "tiny", "prefill-0", "prefill-1", "decode-0", "decode-1"):
            assert word in text
        for word in ("short", "medium", "long", "disaggregated", "local", "KV transfer"):
            assert word in text
        assert "Hello" not in text
        stages = await page.value(
            "[...document.querySelectorAll('#requests li:first-child .waterfall i')]"
            ".map((at) => at.dataset.stage)"
        )
        names = ["reserve", "prefill_queue", "prefill", "transfer", "decode_queue", "first_decode"]
        assert stages == ["admission", "router_queue", *names]
        widths = await page.value(
            "[...document.querySelectorAll('#requests li:first-child .waterfall i')]"
            ".map((at) => at.getBoundingClientRect().width)"
        )
        assert widths[stages.index("prefill")] == max(widths[1:])


async def test_a_request_that_ends_is_shown_without_a_reload(make_world: WorldMaker) -> None:
    async with shown(make_world) as (world, page):
        await world.complete(max_tokens=3)
        await page.until(f"{NUM_ROWS} === 7")
        await world.prefill[0].stop()
        await page.until("document.getElementById('prefill-nodes').innerText.includes('not ready')")


async def test_a_router_with_keys_asks_for_one_and_keeps_it_for_the_tab(
    make_world: WorldMaker,
) -> None:
    tenant, operator = new_key(), new_key()
    keys = (
        hashed(tenant, tenant="alice"),
        hashed(operator, tenant="grafana", is_operator=True),
    )
    form = "document.getElementById('key-form')"
    async with make_world(api_keys=keys, await_ready=False) as world, browser() as page:
        await page.open(str(world.http.base_url) + "/", width=PHONE[0], height=PHONE[1])
        await page.until(f"{form}?.hidden === false")
        assert await page.value("document.activeElement.id") == "key"
        for key in (tenant, operator):
            await page.call("Input.insertText", text=key)
            await page.press("Enter")
            if key == tenant:
                await page.until("document.body.innerText.includes('for operators: their key')")
        await page.until(LIVE)
        assert await page.value(f"{form}.hidden")
        assert await page.value("localStorage.length") == 0
        await page.call("Page.reload")
        await page.until(LIVE)
        page.problems.clear()  # the browser notes what was refused


async def test_a_router_that_goes_is_said_to_be_gone(make_world: WorldMaker) -> None:
    async with shown(make_world) as (world, page):
        await world.router.close(0.0)
        await page.until("document.getElementById('state').textContent === 'no connection'")
        page.problems.clear()  # the browser notes the failed calls


async def test_it_is_used_with_the_keyboard_alone(make_world: WorldMaker) -> None:
    async with shown(make_world) as (_, page):
        await page.press("Tab")
        assert await page.value("document.activeElement.className") == "skip"
        await page.press("Enter")
        assert await page.value("document.activeElement.id") == "requests-title"
        await page.press("Tab")
        assert await page.value("document.activeElement.value") == "first"
        await page.press("ArrowRight")
        assert await page.value("document.activeElement.value") == "whole"
        decodes = "document.querySelectorAll('.waterfall [data-stage=decode]').length"
        assert await page.value(decodes) == 6
        await page.press("Tab")
        await page.press("Enter")
        assert await page.value("document.querySelector('#requests details').open")
        # The table is made once the page hears that its frame is open.
        await page.until("document.querySelector('#requests table')?.rows.length === 9")


async def test_who_wants_no_motion_gets_none(make_world: WorldMaker) -> None:
    async with shown(make_world) as (_, page):
        transition = "getComputedStyle(document.querySelector('.bar i')).transitionDuration"
        assert await page.value(transition) != "0s"
        await page.prefer(scheme="light", reduced_motion=True)
        assert await page.value(transition) == "0s"


async def test_pages_and_their_meters_have_names(make_world: WorldMaker) -> None:
    async with shown(make_world) as (_, page):
        tree = (await page.call("Accessibility.getFullAXTree"))["nodes"]
        named = [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in tree
            if not node["ignored"]
        ]
        for role in ("heading", "meter", "radio", "link", "status"):
            names = [name for found, name in named if found == role]
            assert names, role
            assert role == "status" or all(names)
        assert ("main", "") in named
