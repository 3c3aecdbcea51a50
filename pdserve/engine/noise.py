"""Sampling noise: for each (seed, choice, position) one exponential variate per vocabulary token.

The noise of a token is a function of those three numbers and the token id alone, so it is the same
wherever and with whomever a request is batched. With ``>>>`` a logical shift and all products and
sums modulo 2^64 (keys) or 2^32 (lanes), this is what any other kernel has to repeat:

    mix64(z) = z = (z ^ z>>>30) * 0xBF58476D1CE4E5B9;  z = (z ^ z>>>27) * 0x94D049BB133111EB;
               z ^ z>>>31
    stream   = mix64(mix64(seed + G) + choice + 1)                 G = 0x9E3779B97F4A7C15
    key      = mix64(stream + G * (position + 1)),  k0 = its low, k1 = its high 32 bits
    lane(v)  = x = v + 0x9E3779B9;  x = (x ^ x>>>16) * A;  x = (x ^ x>>>15) * B;  x ^ x>>>16
    bits(v)  = h = (lane(v) ^ k0) * A;  h = ((h ^ h>>>15) + k1) * B;  (h ^ h>>>16) & 0x7FFFFFFF
               with A = 0x7FEB352D, B = 0x846CA68B
    u(v)     = min(max(float32(bits), 0.5), 2^31 - 128) * 2^-31
    noise(v) = log1p(-u(v)), which is minus an Exp(1) variate

Everything up to ``u`` is exact, ``log1p`` is right to about the last bit of float32. Small ``u``,
which decide, keep their relative precision. The token of least ``weight(v) / noise(v)`` is a draw
with probabilities proportional to the weights (an exponential race: the Gumbel-max trick without
the outer logarithm). Mixers: Steele, Lea, Flood 2014 (splitmix64); Wellons 2018.
"""

import torch
from torch import Tensor

_MASK_64 = (1 << 64) - 1
_GOLDEN_64 = 0x9E3779B97F4A7C15
_C = 0xBF58476D1CE4E5B9
_D = 0x94D049BB133111EB
_GOLDEN_32 = 0x9E3779B9
_A = 0x7FEB352D
_B = 0x846CA68B
_LARGEST_U = 2.0**31 - 128  # the float32 below 2^31


def stream_of(seed: int, choice: int) -> int:
    """The 64-bit name of all the noise of one choice of one request."""
    return _mix64(_mix64(seed + _GOLDEN_64) + choice + 1)


def row_key(stream: int, position: int) -> tuple[int, int]:
    """``(k0, k1)`` as signed 32-bit numbers: what one row's noise is made from."""
    key = _mix64(stream + _GOLDEN_64 * (position + 1))
    return _signed(key & 0xFFFFFFFF), _signed(key >> 32)


def signed_64(word: int) -> int:
    """An unsigned number of 64 bits as the signed one of the same bits."""
    return word - (1 << 64) if word >= 1 << 63 else word


def make_lanes(vocab_size: int, device: torch.device) -> Tensor:
    """``lane(v)`` of every token id: int32 ``[V]``."""
    x = (torch.arange(vocab_size, dtype=torch.int64) + _GOLDEN_32) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * _A) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * _B) & 0xFFFFFFFF
    x = x ^ (x >> 16)
    return torch.where(x >= 1 << 31, x - (1 << 32), x).to(torch.int32).to(device)


def noise_bits(keys: Tensor, lanes: Tensor) -> Tensor:
    """``bits`` of each row and token: int32 ``[R, V]`` from keys ``[R, 2]`` and lanes ``[V]``."""
    k0, k1 = keys[:, :1], keys[:, 1:]
    h = torch.bitwise_xor(lanes, k0)
    high = torch.empty_like(h)
    h.mul_(_A)
    h.bitwise_xor_(_logical_shift(h, 15, out=high))
    h.add_(k1).mul_(_signed(_B))
    h.bitwise_xor_(_logical_shift(h, 16, out=high))
    return h.bitwise_and_(0x7FFFFFFF)


def noise(keys: Tensor, lanes: Tensor) -> Tensor:
    """Minus an Exp(1) variate for each row and token: float32 ``[R, V]``, in [-16.7, -2.3e-10]."""
    u = noise_bits(keys, lanes).to(torch.float32)
    return u.clamp_(0.5, _LARGEST_U).mul_(-(2.0**-31)).log1p_()


def _logical_shift(x: Tensor, count: int, *, out: Tensor) -> Tensor:
    torch.bitwise_right_shift(x, count, out=out)  # copies the sign into what the mask clears
    return out.bitwise_and_((1 << (32 - count)) - 1)


def _mix64(z: int) -> int:
    z &= _MASK_64
    z = ((z ^ (z >> 30)) * _C) & _MASK_64
    z = ((z ^ (z >> 27)) * _D) & _MASK_64
    return z ^ (z >> 31)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
