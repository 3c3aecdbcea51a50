"""The proof of the cluster's secret: who has it gets in once for each challenge, others never."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import UnauthenticatedError
from pdserve.rpc.gate import NONCE_LIFE_S, Challenge, Gate, answer, new_nonce, node_proof
from tests.fakes import FakeClock

SECRET, OTHER = "s3cret of this cluster", "s3cret of another"
METHOD = "/pdserve.v1.DecodeNode/Session"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def gate(clock: FakeClock) -> Gate:
    return Gate(SECRET, clock)


def proof_for(gate: Gate, *, secret: str = SECRET, method: str = METHOD) -> bytes:
    """An answer to a challenge of the node."""
    nonce = new_nonce()
    return forged(secret, method, nonce, gate.challenge(nonce).nonce)


def forged(secret: str, method: str, nonce: bytes, nonce_of_node: bytes) -> bytes:
    """The answer of a caller that takes whoever answers for a node of its own."""
    proof = node_proof(secret, nonce, nonce_of_node)
    return answer(secret, method, nonce, Challenge(nonce=nonce_of_node, proof=proof))


def refusal(check: Callable[[], object]) -> str:
    with pytest.raises(UnauthenticatedError) as raised:
        check()
    assert SECRET not in str(raised.value)
    return str(raised.value)


def test_who_has_the_secret_gets_in_and_knows_whom_it_speaks_to(gate: Gate) -> None:
    nonce = new_nonce()
    challenge = gate.challenge(nonce)
    gate.check(METHOD, answer(SECRET, METHOD, nonce, challenge))


def test_a_replayed_proof_is_refused(gate: Gate, clock: FakeClock) -> None:
    proof = proof_for(gate)
    gate.check(METHOD, proof)
    assert "used before" in refusal(lambda: gate.check(METHOD, proof))
    clock.advance(NONCE_LIFE_S - 1)
    gate.check(METHOD, proof_for(gate))
    assert "used before" in refusal(lambda: gate.check(METHOD, proof))
    clock.advance(1)
    assert "too old" in refusal(lambda: gate.check(METHOD, proof))
    gate.check(METHOD, proof_for(gate))  # and forgets what cannot come back
    assert "too old" in refusal(lambda: gate.check(METHOD, proof))


def test_a_proof_is_for_one_method_of_one_node(gate: Gate, clock: FakeClock) -> None:
    proof = proof_for(gate)
    assert "another secret" in refusal(lambda: gate.check("/pdserve.v1.PrefillNode/Watch", proof))
    another = Gate(SECRET, clock)
    assert "no challenge of this node" in refusal(lambda: another.check(METHOD, proof))
    gate.check(METHOD, proof)


def test_another_secret_is_refused_on_both_sides(gate: Gate) -> None:
    wrong = proof_for(gate, secret=OTHER)
    assert "of another secret" in refusal(lambda: gate.check(METHOD, wrong))
    nonce = new_nonce()
    challenge = gate.challenge(nonce)
    words = refusal(lambda: answer(OTHER, METHOD, nonce, challenge))
    assert "who answers there has another secret" in words


def test_a_wrong_proof_uses_nobody_elses_nonce_up(gate: Gate) -> None:
    nonce = new_nonce()
    challenge = gate.challenge(nonce)
    wrong = forged(OTHER, METHOD, nonce, challenge.nonce)
    refusal(lambda: gate.check(METHOD, wrong))
    gate.check(METHOD, answer(SECRET, METHOD, nonce, challenge))


def test_a_call_without_a_proof_is_told_what_is_missing(gate: Gate) -> None:
    assert "no proof of the cluster's secret" in refusal(lambda: gate.check(METHOD, None))


@given(st.binary(max_size=120))
def test_bytes_that_are_no_proof_are_refused_by_name(data: bytes) -> None:
    gate = Gate(SECRET, FakeClock())
    refusal(lambda: gate.check(METHOD, data))


@given(st.integers(0, 87), st.integers(1, 255))
def test_a_proof_with_one_byte_changed_is_refused(place: int, change: int) -> None:
    gate = Gate(SECRET, FakeClock())
    proof = bytearray(proof_for(gate))
    proof[place] ^= change
    refusal(lambda: gate.check(METHOD, bytes(proof)))


@given(st.binary(max_size=40).filter(lambda data: len(data) != 16))
def test_a_nonce_of_another_length_is_none(data: bytes) -> None:
    gate = Gate(SECRET, FakeClock())
    refusal(lambda: gate.challenge(data))
