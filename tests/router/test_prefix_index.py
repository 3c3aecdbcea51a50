"""The router remembers where beginnings of prompts went: bounded, by incarnation, by salt."""

from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.node import NodeAddress, Role
from pdserve.core.routing_config import PrefixConfig
from router.prefix_index import PrefixIndex

BLOCK = 4


def node(name: str, incarnation: str = "1") -> NodeAddress:
    return NodeAddress(name=name, role=Role.DECODE, incarnation=incarnation, address="x:1")


def make(max_entries: int = 100) -> PrefixIndex:
    return PrefixIndex(PrefixConfig(max_entries=max_entries, block_size=BLOCK))


D0, D1 = node("d0"), node("d1")
PROMPT = tuple(range(18))  # four full blocks and two tokens


def test_a_beginning_is_found_as_far_as_it_is_alike() -> None:
    index = make()
    index.sent(index.blocks_of(PROMPT, b""), [D0])
    other = (*PROMPT[:9], 99, *PROMPT[10:])
    assert index.cached(index.blocks_of(PROMPT, b""), [D0, D1]) == {"d0": 16}
    assert index.cached(index.blocks_of(other, b""), [D0, D1]) == {"d0": 8}
    assert index.cached(index.blocks_of(PROMPT[:3], b""), [D0, D1]) == {}


def test_each_node_has_what_it_was_sent() -> None:
    index = make()
    index.sent(index.blocks_of(PROMPT, b""), [D0])
    index.sent(index.blocks_of(PROMPT[:8], b""), [D1])
    assert index.cached(index.blocks_of(PROMPT, b""), [D0, D1]) == {"d0": 16, "d1": 8}


def test_salts_never_meet() -> None:
    index = make()
    index.sent(index.blocks_of(PROMPT, b"one"), [D0])
    assert index.cached(index.blocks_of(PROMPT, b"two"), [D0]) == {}


def test_a_node_made_anew_has_nothing() -> None:
    index = make()
    index.sent(index.blocks_of(PROMPT, b""), [D0])
    assert index.cached(index.blocks_of(PROMPT, b""), [node("d0", "2")]) == {}


def test_what_a_node_had_is_forgotten_once_its_successor_is_sent_it() -> None:
    """Else a block that is never dropped would name all that ever were."""
    index, successor = make(), node("d0", "2")
    blocks = index.blocks_of(PROMPT, b"")
    index.sent(blocks, [D0, D1])
    index.sent(blocks[:2], [successor])
    assert index.cached(blocks, [D0]) == {}
    assert index.cached(blocks, [successor, D1]) == {"d0": 8, "d1": 16}


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning() -> None:
    index = make(max_entries=5)
    index.sent(index.blocks_of(PROMPT, b""), [D0])
    index.sent(index.blocks_of((7,) * 8, b""), [D0])
    assert index.cached(index.blocks_of(PROMPT, b""), [D0]) == {"d0": 12}


def test_without_entries_nothing_is_named_or_kept() -> None:
    index = make(max_entries=0)
    assert index.blocks_of(PROMPT, b"") == ()
    index.sent((), [D0])
    assert len(index) == 0


@given(
    st.integers(1, 8),
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=30), st.sampled_from([D0, D1])), max_size=20
    ),
)
def test_it_stays_bounded_and_claims_only_what_was_sent(
    max_entries: int, history: list[tuple[list[int], NodeAddress]]
) -> None:
    index = make(max_entries)
    for tokens, to in history:
        index.sent(index.blocks_of(tokens, b""), [to])
        assert len(index) <= max_entries
    for tokens, _ in history:
        for name, length in index.cached(index.blocks_of(tokens, b""), [D0, D1]).items():
            assert any(to.name == name and t[:length] == tokens[:length] for t, to in history)
