"""Which idle connection gives its place to a new one, tried with real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from router.http_idle import MAX_LOOKS, IdleConnections

UNREAD = 1 << 20  # bytes, more than both kernels take for who does not read


@asynccontextmanager
async def connections(count: int) -> AsyncIterator[list[tuple[asyncio.Transport, socket.socket]]]:
    """Our ends, and those of clients that read nothing."""
    loop = asyncio.get_running_loop()
    listening = socket.create_server(("127.0.0.1", 0), backlog=count)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    made = []
    try:
        for _ in range(count):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            client.settimeout(10)
            client.connect(listening.getsockname())
            transport, _protocol = await loop.connect_accepted_socket(
                asyncio.Protocol, listening.accept()[0]
            )
            made.append((transport, client))
        yield made
    finally:
        for transport, client in made:
            transport.abort()
            client.close()
        listening.close()
        await asyncio.sleep(0)


async def test_who_has_waited_longest_goes_first_and_who_waits_no_more_never() -> None:
    async with connections(4) as made:
        idle = IdleConnections()
        for transport, _ in made:
            idle.add(transport)
        first, second, third, fourth = (transport for transport, _ in made)
        idle.discard(second)
        idle.discard(first)
        idle.add(first)  # another request came between
        assert [idle.take() for _ in range(4)] == [third, fourth, first, None]


async def test_who_has_not_taken_all_is_asked_again_after_the_others() -> None:
    async with connections(3) as made:
        idle = IdleConnections()
        for transport, _ in made:
            idle.add(transport)
        (slow, client), (second, _), (third, _) = made
        slow.write(bytes(UNREAD))
        assert [idle.take() for _ in range(3)] == [second, third, None]
        num_taken = 0
        while num_taken < UNREAD:
            num_taken += len(await asyncio.to_thread(client.recv, 1 << 16))
        while (taken := idle.take()) is None:
            await asyncio.sleep(0.01)  # its host has not confirmed the last of it
        assert taken is slow


async def test_whose_next_request_is_there_does_not_go() -> None:
    """The event loop has not looked at it yet."""
    async with connections(2) as made:
        idle = IdleConnections()
        for transport, _ in made:
            idle.add(transport)
        made[0][1].sendall(b"GET")
        assert [idle.take() for _ in range(2)] == [made[1][0], None]


async def test_a_closed_one_can_go() -> None:
    async with connections(1) as made:
        idle = IdleConnections()
        idle.add(made[0][0])
        made[0][0].abort()
        await asyncio.sleep(0)
        assert idle.take() is made[0][0]


async def test_a_new_connection_looks_at_a_few_others_only() -> None:
    async with connections(MAX_LOOKS + 1) as made:
        idle = IdleConnections()
        for transport, _ in made:
            idle.add(transport)
        for transport, _ in made[:-1]:
            transport.write(bytes(UNREAD))
        assert idle.take() is None
        assert idle.take() is made[-1][0]
