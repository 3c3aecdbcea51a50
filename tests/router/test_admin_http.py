"""Orders over HTTP: who may give them, what they look like, what the answers are."""

import asyncio

import httpx
import pytest

from pdserve.core.errors import InvalidRequestError
from pdserve.core.node import NodeStanding, Role, Standing
from pdserve.core.orders import ChangeRole, Drain, Order, OrderAnswer, Scale, refusal
from tests.router.conftest import WAIT_S, World, WorldMaker

TOKEN = {"Authorization": "Bearer secret"}


async def carried_out(world: World, answer: str) -> Order:
    """Be the one who keeps the nodes, for one order."""
    async with asyncio.timeout(WAIT_S):
        placed = await world.router.orders.next()
    world.router.orders.answer(OrderAnswer(number=placed.number, message=answer))
    return placed.order


@pytest.mark.parametrize(
    ("path", "body", "order"),
    [
        ("drain", {"node": "decode-0"}, Drain(node="decode-0")),
        ("drain", {"node": "decode-0", "undo": True}, Drain(node="decode-0", undo=True)),
        ("scale", {"role": "decode", "count": 3}, Scale(role="decode", count=3)),
        (
            "role",
            {"node": "decode-0", "role": "prefill"},
            ChangeRole(node="decode-0", role="prefill"),
        ),
    ],
)
async def test_orders_are_handed_on_and_answered(
    make_world: WorldMaker, path: str, body: dict[str, object], order: Order
) -> None:
    async with make_world(admin_token="secret") as world:
        keeping = asyncio.create_task(carried_out(world, "begun"))
        response = await world.http.post(f"/admin/{path}", json=body, headers=TOKEN)
        assert (response.status_code, response.json()) == (200, {"message": "begun"})
        assert await keeping == order


async def test_who_has_not_the_token_gives_no_orders(make_world: WorldMaker) -> None:
    async with make_world(admin_token="secret") as world, make_world() as closed:
        wrong = {"Authorization": "Bearer no"}
        for used, headers in ((world, {}), (world, wrong), (closed, TOKEN)):
            response = await used.http.post(
                "/admin/drain", json={"node": "decode-0"}, headers=headers
            )
            assert response.status_code == 401


async def test_what_is_refused_is_a_client_error_with_the_reason(make_world: WorldMaker) -> None:
    async def refuse(world: World) -> None:
        placed = await world.router.orders.next()
        error = InvalidRequestError("node", "got 'x', there are decode-0")
        world.router.orders.answer(refusal(placed.number, error))

    async with make_world(admin_token="secret") as world:
        refusing = asyncio.create_task(refuse(world))
        response = await world.http.post("/admin/drain", json={"node": "x"}, headers=TOKEN)
        await refusing
        assert error_of(response) == (400, "node: got 'x', there are decode-0")
        for path in ("scale", "role"):
            body = {"role": "decode"}
            response = await world.http.post(f"/admin/{path}", json=body, headers=TOKEN)
            assert response.status_code == 400


async def test_an_order_that_is_too_large_is_told_what_is_allowed(make_world: WorldMaker) -> None:
    async with make_world(admin_token="secret") as world:
        response = await world.http.post("/admin/drain", content=b"x" * 5000, headers=TOKEN)
    status, message = error_of(response)
    assert status == 413
    assert message.endswith("larger than 4096 bytes, the most that an order allows")


async def test_a_draining_node_gets_nothing_new_and_is_shown(make_world: WorldMaker) -> None:
    async with make_world(num_decode=2) as world:
        draining, other = world.decode
        serving = [
            NodeStanding(
                name=node.name,
                role=Role.DECODE,
                standing=Standing.DRAINING if node is draining else Standing.SERVING,
                address=node.address,
            )
            for node in world.decode
        ]
        lost = NodeStanding(
            name="decode-2", role=Role.DECODE, standing=Standing.LOST, reason="rank 0 died"
        )
        world.router.set_standings([*serving, lost])
        for _ in range(4):
            answer = await world.complete(max_tokens=100, timeline=True)
            assert "left out: decode-0 (draining)" in answer.json()["timeline"]["explain"]
        assert not draining.submitted
        assert len(other.submitted) == 4
        shown = {node["name"]: (node["state"], node["reason"]) for node in await world.nodes()}
        assert shown == {
            "decode-0": ("draining", "draining"),
            "decode-1": ("ready", None),
            "decode-2": ("lost", "rank 0 died"),
        }


def error_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["message"]
