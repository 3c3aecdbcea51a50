"""HEAD, which probes and balancers send: as GET, on every route that GET has."""

import pytest

from tests.router.conftest import World

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/version", "/v1/models", "/v1/models/tiny", "/metrics", "/"]
)
async def test_head_is_answered_as_get_without_a_body(world: World, path: str) -> None:
    got, head = await world.http.get(path), await world.http.head(path)
    assert head.status_code == got.status_code == 200
    assert head.content == b""
    for name in ("content-type", "content-length"):
        if path != "/metrics" or name != "content-length":  # it counts the calls
            assert head.headers[name] == got.headers[name]


async def test_head_of_what_is_no_get_is_refused(world: World) -> None:
    assert (await world.http.head("/v1/completions")).status_code == 405
    assert (await world.http.head("/nowhere")).status_code == 404
