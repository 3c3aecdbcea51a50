"""API keys over HTTP: who gets in where, and that a tenant sees nothing of another's."""

import asyncio
import logging
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from pdserve.core.api_keys import hashed, line_of
from pdserve.core.security_config import SecurityConfig
from tests.router.conftest import ANSWER, World, WorldMaker, until_ready
from tests.security.keys import ALICE, BOB, FILE, KEYS, OPERATOR, STRANGER, TOKEN, bearer

pytestmark = pytest.mark.asyncio(loop_scope="module")

CALLS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/metrics/targets"),
    ("GET", "/admin/status"),
    ("GET", "/admin/live"),
    ("GET", "/debug/route?prompt_len=3"),
    ("POST", "/debug/route"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing/here"),
    ("GET", "/health/../v1/models"),
    ("GET", "/%2Fhealth"),
]
FOR_OPERATORS = [
    ("GET", "/metrics"),
    ("GET", "/metrics/targets"),
    ("GET", "/admin/live"),
    ("GET", "/admin/status"),
    ("GET", "/debug/route?prompt_len=3"),
]
BODY = {"prompt": "Hello", "max_tokens": 100}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def closed(make_world: WorldMaker):
    async with make_world(api_keys=KEYS, admin_token=TOKEN) as made:
        yield made


@pytest.mark.parametrize(("method", "path"), CALLS)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": f"Basic {ALICE}"},
        {"authorization": ALICE},
        bearer(STRANGER),
        bearer(ALICE[:-1]),
        bearer(ALICE + "x"),
        bearer(TOKEN + "x"),
        {"x-api-key": ALICE},
    ],
)
async def test_without_a_key_of_ours_every_route_is_closed(
    closed: World, method: str, path: str, headers: dict[str, str]
) -> None:
    response = await closed.http.request(method, path, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert error["type"] == "unauthenticated_error"
    assert error["code"] == "invalid_api_key"
    assert not any(key[:-1] in response.text for key in (ALICE, STRANGER, TOKEN))


async def test_probes_are_open_and_say_no_more_than_how_it_is(closed: World) -> None:
    assert (await closed.http.get("/health")).json() == {"status": "ok"}
    ready = await closed.http.get("/ready")
    assert (ready.status_code, ready.json()["reason"]) == (200, None)


async def test_a_key_of_ours_is_let_in(closed: World) -> None:
    for key in (ALICE, BOB, OPERATOR):
        response = await closed.http.post("/v1/completions", json=BODY, headers=bearer(key))
        assert response.json()["choices"][0]["text"] == ANSWER


@pytest.mark.parametrize(("method", "path"), FOR_OPERATORS)
async def test_what_operators_see_is_for_their_keys_and_the_admin_token(
    closed: World, method: str, path: str
) -> None:
    for key, status in ((ALICE, 403), (OPERATOR, 200), (TOKEN, 200)):
        response = await closed.http.request(method, path, headers=bearer(key))
        assert response.status_code == status
    assert response.request.url.path == path.partition("?")[0]


async def test_orders_need_the_admin_token_whatever_the_key(closed: World) -> None:
    for headers in ({}, bearer(ALICE), bearer(OPERATOR)):
        response = await closed.http.post(
            "/admin/drain", json={"node": "decode-0"}, headers=headers
        )
        assert response.status_code == 401
        assert "admin token" in response.json()["error"]["message"]
        assert "--token" in response.json()["error"]["message"]


async def test_the_openai_package_raises_what_it_raises_for_a_wrong_key(closed: World) -> None:
    url = f"http://{closed.router.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=STRANGER, max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.completions.create(model="tiny", prompt="Hello")
    async with openai.AsyncOpenAI(base_url=url, api_key=ALICE, max_retries=0) as client:
        answer = await client.completions.create(model="tiny", prompt="Hello", max_tokens=100)
    assert answer.choices[0].text == ANSWER


async def test_tenants_share_no_cached_kv_and_their_own_salts_still_divide(closed: World) -> None:
    node = closed.decode[0]
    node.submitted.clear()
    for key, salt in ((ALICE, None), (ALICE, None), (BOB, None), (ALICE, "s"), (BOB, "s")):
        body = BODY | ({"cache_salt": salt} if salt else {})
        await closed.http.post("/v1/completions", json=body, headers=bearer(key))
    first, again, other, salted, other_salted = (request.cache_salt for request in node.submitted)
    assert first == again
    assert len({first, other, salted, other_salted}) == 4
    assert all(salt for salt in (first, other)), "nobody else's requests have this salt"


async def test_no_salt_that_a_tenant_gives_is_another_tenants(closed: World) -> None:
    node = closed.decode[0]
    node.submitted.clear()
    await closed.http.post("/v1/completions", json=BODY, headers=bearer(BOB))
    bobs = node.submitted[0].cache_salt.decode()
    await closed.http.post(
        "/v1/completions", json=BODY | {"cache_salt": bobs}, headers=bearer(ALICE)
    )
    assert node.submitted[1].cache_salt != node.submitted[0].cache_salt


async def test_keys_and_who_was_refused_are_not_to_be_read_from_the_log(
    closed: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        for key in (ALICE, STRANGER, TOKEN):
            for path in ("/v1/models", "/metrics", f"/v1/models/{key}"):
                await closed.http.get(path, headers=bearer(key))
        for _ in range(100):
            await closed.http.get("/v1/models", headers=bearer(STRANGER))
    ours = [record for record in caplog.records if not record.name.startswith("http")]
    lines = [record.getMessage() for record in ours]
    assert not any(key in line for key in (ALICE, STRANGER, TOKEN) for line in lines)
    assert sum("refused" in line for line in lines) <= 3, "a stranger cannot fill the log"


async def status_of(world: World, key: str) -> int:
    return (await world.http.get("/v1/models", headers=bearer(key))).status_code


async def test_a_file_of_keys_is_read_again_when_it_changes(
    make_world: WorldMaker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text(FILE)

    async with make_world(
        security=SecurityConfig(api_keys_file=str(file)), await_ready=False
    ) as changing:
        await until_ready(changing.http)
        assert await status_of(changing, ALICE) == 200
        assert await status_of(changing, STRANGER) == 401
        file.write_text(line_of(hashed(STRANGER, tenant="new")))
        async with asyncio.timeout(10):
            while await status_of(changing, STRANGER) != 200:
                await asyncio.sleep(0.1)
        assert await status_of(changing, ALICE) == 401
        file.write_text("alice " + ALICE)  # no hash: the keys stay as they were
        await asyncio.sleep(1.2)
        assert await status_of(changing, STRANGER) == 200
        assert await status_of(changing, ALICE) == 401
        file.unlink()
        await asyncio.sleep(1.2)
        assert await status_of(changing, STRANGER) == 200
    assert "line 1: expected NAME sha256:HASH" in caplog.text
    assert "cannot be read: No such file" in caplog.text
    assert ALICE not in caplog.text


async def test_a_file_without_keys_lets_nobody_in(make_world: WorldMaker, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# none yet\n")
    async with make_world(security=SecurityConfig(api_keys_file=str(file))) as closed:
        for headers in ({}, bearer(ALICE)):
            assert (await closed.http.get("/v1/models", headers=headers)).status_code == 401


@pytest.mark.parametrize("path", ["/", "/live/page.js", "/live/page.css"])
async def test_the_live_page_is_for_everybody_and_tells_nothing(closed: World, path: str) -> None:
    answer = await closed.http.get(path)
    assert answer.status_code == 200
    assert "decode-0" not in answer.text


@pytest.mark.parametrize("path", ["/live/../metrics", "/live/%2e%2e/metrics", "/live//metrics"])
async def test_no_way_leads_past_the_live_page(closed: World, path: str) -> None:
    assert (await closed.http.get(path)).status_code in (401, 404)
