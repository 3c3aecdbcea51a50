"""Loads: what nodes say, and what was sent since."""

from dataclasses import replace

from pdserve.core.cost import NodeCosts, PrefillCost
from pdserve.core.node import NodeAddress, Role
from router.load_book import LoadBook, Placement
from router.nodes import NodeState, NodeView


def view(name: str, role: Role, *, running: int = 0, queued: int = 0) -> NodeView:
    state = NodeState(
        ready=True,
        reason=None,
        total_blocks=100,
        free_blocks=90,
        block_size=16,
        running=running,
        waiting=0,
        waiting_for_blocks=0,
        draining_blocks=0,
        queued_prefill_tokens=queued,
        num_preemptions=0,
        kv_bytes_moved=0,
        connected_prefill_nodes=("p0",),
    )
    return NodeView(
        address=NodeAddress(name=name, role=role, incarnation="1", address="127.0.0.1:1"),
        session=1,
        max_model_len=512,
        ranks=(),
        state=state,
        was_paired=True,
        problem=None,
    )


def loads(book: LoadBook, *, running: int = 0, queued: int = 0) -> tuple[int, int]:
    """(requests on d0, tokens on p0) where the nodes say that they have ``running``, ``queued``."""
    seen = book.loads(
        [view("d0", Role.DECODE, running=running), view("p0", Role.PREFILL, queued=queued)]
    )
    return seen.decode[0].num_requests, seen.prefill[0].queued_tokens


def placement() -> Placement:
    return Placement(
        decode_node="d0", prefill_node="p0", num_choices=2, prefill_len=100, context_len=300
    )


def test_what_was_sent_since_the_node_spoke_is_added_to_its_word() -> None:
    book = LoadBook()
    book.add(placement())
    assert loads(book, running=5, queued=700) == (7, 800)


def test_what_the_node_has_spoken_of_is_not_counted_twice() -> None:
    book = LoadBook()
    book.add(placement())
    book.heard("d0")
    book.heard("p0")
    assert loads(book, running=5, queued=700) == (5, 700)


def test_a_request_still_on_its_way_counts_although_the_node_spoke() -> None:
    book = LoadBook()
    book.add(placement())
    book.heard("d0")
    book.heard("p0")
    assert loads(book) == (2, 100)


def test_a_first_token_takes_the_prompt_and_the_end_takes_the_rest() -> None:
    book = LoadBook()
    first, second = placement(), placement()
    book.add(first)
    book.add(second)
    book.prefilled(first)
    assert loads(book) == (4, 100)
    book.prefilled(first)
    book.remove(first)
    assert loads(book) == (2, 100)
    book.remove(second)
    book.remove(second)
    assert loads(book) == (0, 0)


def test_a_prompt_that_its_decode_node_prefills_waits_there() -> None:
    book = LoadBook()
    local = replace(placement(), prefill_node=None)
    book.add(local)
    (node,) = book.loads([view("d0", Role.DECODE, queued=7)]).decode
    assert (node.queued_tokens, node.context_tokens) == (107, 300)
    book.prefilled(local)
    (node,) = book.loads([view("d0", Role.DECODE, queued=7)]).decode
    assert (node.queued_tokens, node.context_tokens) == (7, 300)
    book.remove(local)
    (node,) = book.loads([view("d0", Role.DECODE)]).decode
    assert (node.queued_tokens, node.context_tokens) == (0, 0)


def test_what_a_node_says_of_its_costs_is_in_its_load() -> None:
    costs = NodeCosts(prefill=PrefillCost(a=1.0, b=2.0, c=3.0))
    seen = view("p0", Role.PREFILL)
    assert seen.state is not None
    told = replace(seen, state=replace(seen.state, costs=costs, prefill_chunk=512))
    (node,) = LoadBook().loads([told]).prefill
    assert (node.costs, node.prefill_chunk) == (costs, 512)


def test_nodes_that_are_not_ready_have_no_load() -> None:
    lost = NodeView(
        address=NodeAddress(name="d0", role=Role.DECODE, incarnation="1", address="127.0.0.1:1"),
        session=None,
        max_model_len=512,
        ranks=(),
        state=None,
        was_paired=True,
        problem="gone",
    )
    assert LoadBook().loads([lost]).decode == ()
