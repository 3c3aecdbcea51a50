"""Names of KV blocks by their content: equal names, equal tokens from the first one on.

A block's name is a hash over the block before it and its own tokens, so one name stands for the
whole prefix that ends with it. Nodes find cached blocks by it, the router the node that has them.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

PrefixHash = NewType("PrefixHash", bytes)

HASH_BYTES = 16  # 128 bits: no collision by chance, and none that can be made to order


def prefix_hashes(
    token_ids: Sequence[int], block_size: int, salt: bytes = b""
) -> tuple[PrefixHash, ...]:
    """One name for each full block of ``token_ids``; those of different salts never meet."""
    hashes: list[PrefixHash] = []
    extend_hashes(hashes, token_ids, block_size, salt)
    return tuple(hashes)


def extend_hashes(
    hashes: list[PrefixHash], token_ids: Sequence[int], block_size: int, salt: bytes = b""
) -> None:
    """Append the names of those full blocks of ``token_ids`` that have none in ``hashes`` yet."""
    first = len(hashes) * block_size
    tokens = array("I", token_ids[first:])
    parent: bytes = hashes[-1] if hashes else _root(salt)
    for stop in range(block_size, len(tokens) + 1, block_size):
        block = tokens[stop - block_size : stop].tobytes()
        parent = blake2b(block, key=parent, digest_size=HASH_BYTES).digest()
        hashes.append(PrefixHash(parent))


def _root(salt: bytes) -> bytes:
    return blake2b(salt, digest_size=HASH_BYTES, person=b"pdserve").digest()
