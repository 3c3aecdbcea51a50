"""Decode and prefill nodes over real gRPC: pairing, losing and finding each other, closing."""

import asyncio
import gc
import logging
from dataclasses import replace

import pytest

from pdserve.core.config import DecodeConfig, PrefillConfig
from pdserve.core.errors import RankError
from pdserve.core.request import RouteTaken
from tests.nodes.site import Site
from tests.nodes.specs import MODEL, ask


async def test_a_prompt_goes_to_the_prefill_node_and_its_tokens_come_from_the_decode_node():
    async with Site() as site:
        router = await site.start_all("p0")
        asked = ask(site.model, 1, prompt_len=50, max_tokens=12, prefill_nodes=("p0",))
        router.submit(asked)
        await router.until_over(asked)
        last = asked.timelines[-1]
        assert last.route is RouteTaken.DISAGGREGATED
        assert last.kv_bytes == 50 * site.ranks["decode-0"].layout.token_bytes
        await site.until_free()


async def test_unequal_block_sizes_and_tp_sizes_are_a_pair():
    async with Site() as site:
        await site.start_decode(DecodeConfig(tensor_parallel_size=2), block_size=4)
        address = await site.start_prefill(
            "p0", PrefillConfig(tensor_parallel_size=4, max_num_batched_tokens=7), block_size=6
        )
        site.decode.set_prefill_nodes((address,))
        router = await site.start_router()
        await router.until(lambda: router.connected == ["p0"])
        asked = ask(site.model, 1, prompt_len=50, max_tokens=12, prefill_nodes=("p0",))
        router.submit(asked)
        await router.until_over(asked)
        assert asked.timelines[-1].kv_bytes == 2 * 50 * site.ranks["decode-0"].layout.token_bytes
        await site.until_free()


@pytest.mark.parametrize(
    ("field", "ours", "theirs", "options"),
    [
        ("dtype", "float32", "bfloat16", {"dtype": "bfloat16"}),
        (
            "model_fingerprint",
            MODEL.fingerprint,
            "beef",
            {"model": replace(MODEL, fingerprint="beef")},
        ),
    ],
)
async def test_nodes_that_do_not_fit_say_by_field_why_on_both_sides(
    field, ours, theirs, options, caplog
):
    async with Site() as site:
        await site.start_decode()
        address = await site.start_prefill("p0", **options)
        site.decode.set_prefill_nodes((address,))
        router = await site.start_router()
        asked = ask(site.model, 1, prompt_len=20, max_tokens=3, prefill_nodes=("p0",))
        router.submit(asked)
        await router.until_over(asked)
        assert asked.timelines[-1].route is RouteTaken.FALLBACK
        async with asyncio.timeout(5):
            while not {"decode_node.channel", "prefill_node.server"} <= _warned(caplog, field):
                await site.post.pause(0.05)
        for record in caplog.records:
            if record.name in ("decode_node.channel", "prefill_node.server"):
                assert repr(ours) in record.message
                assert repr(theirs) in record.message


async def test_a_prefill_node_made_anew_is_connected_again_and_the_old_one_forgotten():
    async with Site() as site:
        router = await site.start_all("p0")
        await site.kill("p0")
        await router.until(lambda: router.connected == [])
        address = await site.start_prefill("p0")
        site.decode.set_prefill_nodes((address,))
        await router.until(lambda: router.connected == ["p0"])
        asked = ask(site.model, 1, prompt_len=50, max_tokens=5, prefill_nodes=("p0",))
        router.submit(asked)
        await router.until_over(asked)
        assert asked.timelines[-1].route is RouteTaken.DISAGGREGATED
        await site.until_free()


async def test_another_start_of_a_prefill_node_is_not_taken_for_the_one_that_was_named(caplog):
    async with Site() as site:
        await site.start_decode()
        address = await site.start_prefill("p0")
        site.decode.set_prefill_nodes((replace(address, incarnation="p0#0"),))
        async with asyncio.timeout(5):
            while "answers another start, p0#2" not in caplog.text:
                await site.post.pause(0.05)
        assert site.decode.node.legs.connected == []


async def test_a_prefill_node_that_was_unreachable_for_a_while_is_connected_again():
    async with Site() as site:
        router = await site.start_all("p0")
        site.fabric.cut(site.ranks["p0"].incarnation, site.ranks["decode-0"].incarnation)
        await router.until(lambda: router.connected == [])
        await router.until(lambda: router.connected == ["p0"])


async def test_a_prefill_node_that_is_taken_away_is_left():
    async with Site() as site:
        router = await site.start_all("p0", "p1")
        site.decode.set_prefill_nodes((site.nodes["p1"].address,))
        await router.until(lambda: router.connected == ["p1"])


@pytest.mark.parametrize(
    ("prefill_nodes", "route"),
    [(("p0", "p1"), RouteTaken.DISAGGREGATED), (("p0",), RouteTaken.FALLBACK)],
)
async def test_when_a_prefill_node_dies_during_a_transfer_the_next_stop_of_the_route_does_it(
    prefill_nodes, route
):
    async with Site(longest_s=0.05) as site:
        router = await site.start_all("p0", "p1")
        asked = ask(site.model, 1, prompt_len=120, max_tokens=6, prefill_nodes=prefill_nodes)
        router.submit(asked)
        async with asyncio.timeout(10):
            while not any(site.ranks["p0"].blocks_in_use()):
                await site.post.pause(0.05)
        await site.kill("p0")
        await router.until_over(asked)
        assert asked.got == asked.expected
        assert asked.timelines[-1].route is route
        await site.until_free()


async def test_when_the_decode_node_dies_the_prefill_node_gets_its_blocks_back():
    async with Site(longest_s=0.05) as site:
        router = await site.start_all("p0")
        router.submit(ask(site.model, 1, prompt_len=120, max_tokens=6, prefill_nodes=("p0",)))
        async with asyncio.timeout(10):
            while not any(site.ranks["p0"].blocks_in_use()):
                await site.post.pause(0.05)
        await site.kill("decode-0")
        await site.until_free()


async def test_a_decode_node_made_anew_is_served_by_the_prefill_node_that_survived():
    async with Site(longest_s=0.02) as site:
        router = await site.start_all("p0")
        router.submit(ask(site.model, 1, prompt_len=120, max_tokens=6, prefill_nodes=("p0",)))
        async with asyncio.timeout(10):
            while not any(site.ranks["p0"].blocks_in_use()):
                await site.post.pause(0.05)
        await site.kill("decode-0")
        await site.start_decode()
        site.decode.set_prefill_nodes((site.nodes["p0"].address,))
        successor = await site.start_router()
        await successor.until(lambda: successor.connected == ["p0"])
        asked = ask(site.model, 2, prompt_len=120, max_tokens=6, prefill_nodes=("p0",))
        successor.submit(asked)
        await successor.until_over(asked)
        assert asked.got == asked.expected
        assert asked.timelines[-1].route is RouteTaken.DISAGGREGATED
        await site.until_free()


async def test_two_hundred_requests_at_once_get_their_answers():
    async with Site() as site:
        router = await site.start_all("p0", "p1")
        routes = [(), ("p0",), ("p0", "p1"), ("p1", "p0"), ("gone",)]
        asked = [
            ask(
                site.model,
                i,
                prompt_len=1 + i % 60,
                max_tokens=1 + i % 23,
                prefill_nodes=routes[i % len(routes)],
                num_choices=1 + (i % 7 == 0),
                penalty=0.5 * (i % 3 == 0),
            )
            for i in range(200)
        ]
        for each in asked:
            router.submit(each)
        for each in asked[::9]:
            await router.until_begun(each)
            router.abort(each)
        await router.until_over(*asked)
        assert all(each.failure is None for each in asked)
        await site.until_free()


async def test_while_prefill_nodes_die_and_come_back_every_request_gets_its_answer():
    async with Site(longest_s=0.01) as site:
        router = await site.start_all("p0", "p1")
        requests = []
        for turn in range(6):
            for i in range(10):
                number = 10 * turn + i
                asked = ask(
                    site.model,
                    number,
                    prompt_len=20 + number,
                    max_tokens=10 + i,
                    prefill_nodes=("p0", "p1") if i % 2 else ("p1", "p0"),
                    num_choices=1 + (i == 3),
                )
                requests.append(asked)
                router.submit(asked)
            await router.until_begun(requests[-1])
            name = f"p{turn % 2}"
            await site.kill(name)
            await site.start_prefill(name)
            site.decode.set_prefill_nodes((site.nodes["p0"].address, site.nodes["p1"].address))
        await router.until_over(*requests)
        assert all(asked.got == asked.expected for asked in requests)
        routes = {asked.timelines[-1].route for asked in requests}
        assert RouteTaken.DISAGGREGATED in routes
        await site.until_free()


async def test_a_node_whose_ranks_are_lost_says_so_and_takes_no_more_work():
    async with Site() as site:
        router = await site.start_all("p0")
        held = ask(site.model, 2, prompt_len=5, max_tokens=300)
        router.submit(held)
        await router.until_begun(held)
        site.ranks["decode-0"].fail(RankError("rank 0 has left"))
        async with asyncio.timeout(5):
            error = await site.decode.failed
        assert isinstance(error, RankError)
        await router.until_over(held)
        assert (held.failure, held.retryable) == ("rank_error", True)
        await router.until(lambda: not router.statuses[-1].ready)
        assert "rank 0 has left" in router.statuses[-1].reason
        asked = ask(site.model, 1, prompt_len=5, max_tokens=5)
        router.submit(asked)
        await router.until_over(asked)
        assert (asked.failure, asked.retryable) == ("node_lost_error", True)


async def test_what_a_prefill_node_held_when_its_ranks_were_lost_goes_to_the_next_at_once():
    async with Site(longest_s=0.05) as site:
        router = await site.start_all("p0", "p1")
        asked = ask(site.model, 1, prompt_len=120, max_tokens=6, prefill_nodes=("p0", "p1"))
        router.submit(asked)
        async with asyncio.timeout(10):
            while not any(site.ranks["p0"].blocks_in_use()):
                await site.post.pause(0.05)
        site.ranks["p0"].fail(RankError("rank 0 has left"))
        await router.until_over(asked)
        assert asked.got == asked.expected
        assert "p1" in {stage.node for stage in asked.timelines[-1].stages}


async def test_a_closing_node_says_so_lets_requests_finish_and_takes_no_more():
    async with Site() as site:
        router = await site.start_all()
        first = ask(site.model, 1, prompt_len=5, max_tokens=40)
        router.submit(first)
        await router.until_begun(first)
        closing = asyncio.create_task(site.decode.close(grace_s=2.0))
        await router.until(lambda: not router.statuses[-1].ready)
        second = ask(site.model, 2, prompt_len=5, max_tokens=5)
        router.submit(second)
        await router.until_over(first, second)
        assert first.got == first.expected
        assert (second.failure, second.retryable) == ("node_lost_error", True)
        await router.close()
        await closing


async def test_nothing_is_left_after_closing_in_the_midst_of_everything():
    before = asyncio.all_tasks()
    async with Site() as site:
        router = await site.start_all("p0", "p1")
        for i in range(4):
            router.submit(
                ask(site.model, i, prompt_len=90, max_tokens=300, prefill_nodes=("p0", "p1"))
            )
        await router.until(lambda: bool(site.decode.node.num_requests))
    await asyncio.sleep(0)
    gc.collect()
    assert asyncio.all_tasks() == before


def _warned(caplog: pytest.LogCaptureFixture, field: str) -> set[str]:
    """Who warned of a handshake that failed for this field."""
    return {
        record.name
        for record in caplog.records
        if record.levelno == logging.WARNING and f"handshake: {field} differs" in record.message
    }
