"""The live page's files and data; how it looks and behaves is tested in a browser."""

import json
import re
from importlib import resources
from typing import Any

import pytest

from router.live_page import FILES
from tests.router.conftest import World

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET_PROMPT = "a word that nobody else would say: xyzzy"
REFERENCE = re.compile(r'(?:href|src|from|import) ?=? ?"(?!data:|#)([^"]+)"')


async def data(world: World, **since: int) -> dict[str, Any]:
    answer = await world.http.get("/admin/live", params=since)
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


async def test_the_page_needs_nothing_from_elsewhere(world: World) -> None:
    page = await world.http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for name, kind in FILES.items():
        answer = await world.http.get(f"/live/{name}")
        assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
    texts = [path.read_text() for path in (resources.files("router") / "live").iterdir()]
    for text in texts:
        assert "//" not in "".join(REFERENCE.findall(text))
        assert not re.search(r"url\((?!data:)|@import|https?://(?!www\.w3\.org)", text)
        assert "innerHTML" not in text
    references = set(REFERENCE.findall(page.text))
    assert {"live/page.css", "live/page.js"} <= references


@pytest.mark.parametrize("name", ["index.html", "..%2fserver.py", "%2e%2e/server.py", "x"])
async def test_no_other_file_is_given(world: World, name: str) -> None:
    assert (await world.http.get(f"/live/{name}")).status_code == 404


async def test_a_request_is_told_with_its_stages_and_without_its_text(world: World) -> None:
    before = (await data(world))["last_request"]
    answer = await world.complete(prompt=SECRET_PROMPT, max_tokens=3, ignore_eos=True)
    assert answer.status_code == 200
    await world.until_idle()
    told = await data(world, requests_since=before)
    (request,) = told["recent"]
    assert told["last_request"] == request["number"] == before + 1
    assert (request["route"], request["output_tokens"], request["error"]) == ("local", 3, None)
    names = [name for name, _, _ in request["stages"]]
    assert names == ["admission", "router_queue", "prefill", "first_decode"]
    assert 0 < request["ttft_s"] <= request["latency_s"]
    assert "xyzzy" not in json.dumps(told)
    assert answer.json()["choices"][0]["text"] not in json.dumps(told)


async def test_what_was_told_is_not_told_again(world: World) -> None:
    await world.complete(max_tokens=1)
    await world.until_idle()
    first = await data(world)
    again = await data(
        world, requests_since=first["last_request"], samples_since=first["last_sample"]
    )
    assert again["recent"] == []
    assert len(again["samples"]) <= 1 < len(first["samples"]) + 1


async def test_nodes_and_queues_are_those_of_the_status(world: World) -> None:
    status, told = await world.status(), await data(world)
    assert [node["name"] for node in told["nodes"]] == ["decode-0"]
    assert {key: told[key] for key in ("state", "model", "version", "routes")} == {
        key: status[key] for key in ("state", "model", "version", "routes")
    }
    assert told["headroom_blocks"].keys() == {"decode-0"}


async def test_numbers_that_are_none_are_refused(world: World) -> None:
    answer = await world.http.get("/admin/live", params={"requests_since": "x"})
    assert answer.status_code in (400, 422)
