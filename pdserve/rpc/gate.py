"""The proof that both ends of a call have the cluster's secret, made anew for each call. No I/O.

    caller                                                node
      Challenge: the caller's nonce ───────────────────────>
           <────────── the node's nonce, HMAC(secret, "node", both nonces)
      call: both nonces, HMAC(secret, "caller", method, both nonces) ──>

Neither learns the secret, and a caller says nothing to a node that has another one. The node's
nonce is good for one call within ``NONCE_LIFE_S``, so a call that was recorded is of no use. A node
keeps nothing for those who only ask: it knows its own nonces by their MAC, and remembers those that
were used with a good proof. What follows on the connection is protected by TLS, or not at all.
"""

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass

from pdserve.core.clock import Clock
from pdserve.core.errors import UnauthenticatedError

METADATA_KEY = "pdserve-proof-bin"
NONCE_LIFE_S = 30.0
CALLER_NONCE_BYTES = 16
_TIME = struct.Struct(">d")
_RANDOM_BYTES, _MAC_BYTES = 16, 16
NODE_NONCE_BYTES = _TIME.size + _RANDOM_BYTES + _MAC_BYTES
PROOF_BYTES = 32
CURE = "give all processes of the cluster the same secret"


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """What a node answers to a caller's nonce."""

    nonce: bytes
    proof: bytes


class Gate:
    """A node's side."""

    def __init__(self, secret: str, clock: Clock) -> None:
        self._secret = secret
        self._clock = clock
        self._own_key = secrets.token_bytes(32)
        self._used: dict[bytes, float] = {}  # nonces, and until when they would be good

    def challenge(self, caller_nonce: bytes) -> Challenge:
        """Raises UnauthenticatedError for what is no nonce."""
        if len(caller_nonce) != CALLER_NONCE_BYTES:
            raise UnauthenticatedError("this is no nonce")
        head = _TIME.pack(self._clock.now_s()) + secrets.token_bytes(_RANDOM_BYTES)
        nonce = head + self._mac(head)
        return Challenge(nonce=nonce, proof=node_proof(self._secret, caller_nonce, nonce))

    def check(self, method: str, given: bytes | None) -> None:
        """``given`` is the call's metadata. Raises UnauthenticatedError saying what is wrong."""
        if given is None:
            raise UnauthenticatedError(f"the call has no proof of the cluster's secret; {CURE}")
        nonce, caller_nonce, proof = _split(given)
        head, mac = nonce[:-_MAC_BYTES], nonce[-_MAC_BYTES:]
        now_s = self._clock.now_s()
        if not hmac.compare_digest(mac, self._mac(head)):
            raise UnauthenticatedError("the proof answers no challenge of this node")
        expires_s = _TIME.unpack(head[: _TIME.size])[0] + NONCE_LIFE_S
        if now_s >= expires_s:
            raise UnauthenticatedError("the proof is too old")
        if not hmac.compare_digest(proof, _proof(self._secret, method, caller_nonce, nonce)):
            raise UnauthenticatedError(f"the proof is of another secret; {CURE}")
        if nonce in self._used:
            raise UnauthenticatedError("the proof was used before")
        self._used = {old: until_s for old, until_s in self._used.items() if until_s > now_s}
        self._used[nonce] = expires_s

    def _mac(self, head: bytes) -> bytes:
        return hmac.digest(self._own_key, head, "sha256")[:_MAC_BYTES]


def new_nonce() -> bytes:
    """A caller's."""
    return secrets.token_bytes(CALLER_NONCE_BYTES)


def node_proof(secret: str, caller_nonce: bytes, node_nonce: bytes) -> bytes:
    """What tells a caller that the node has the secret."""
    return _hmac(secret, b"node", caller_nonce, node_nonce)


def answer(secret: str, method: str, caller_nonce: bytes, challenge: Challenge) -> bytes:
    """The metadata with which the call is let in.

    Raises UnauthenticatedError where who answered has another secret.
    """
    expected = node_proof(secret, caller_nonce, challenge.nonce)
    is_nonce = len(challenge.nonce) == NODE_NONCE_BYTES
    if not is_nonce or not hmac.compare_digest(challenge.proof, expected):
        raise UnauthenticatedError(f"who answers there has another secret; {CURE}")
    proof = _proof(secret, method, caller_nonce, challenge.nonce)
    return challenge.nonce + caller_nonce + proof


def _split(given: bytes) -> tuple[bytes, bytes, bytes]:
    if len(given) != NODE_NONCE_BYTES + CALLER_NONCE_BYTES + PROOF_BYTES:
        raise UnauthenticatedError("the proof has a wrong length")
    rest = given[NODE_NONCE_BYTES:]
    return given[:NODE_NONCE_BYTES], rest[:CALLER_NONCE_BYTES], rest[CALLER_NONCE_BYTES:]


def _proof(secret: str, method: str, caller_nonce: bytes, node_nonce: bytes) -> bytes:
    return _hmac(secret, b"caller", method.encode(), caller_nonce, node_nonce)


def _hmac(secret: str, *parts: bytes) -> bytes:
    framed = b"".join(struct.pack(">I", len(part)) + part for part in parts)
    key = hashlib.sha256(b"pdserve cluster secret\n" + secret.encode()).digest()
    return hmac.digest(key, framed, "sha256")
