"""Masks of the vocabulary from packed bits to the device. Their meaning is ``Constraint``'s."""

from collections.abc import Sequence

import torch
from torch import Tensor


def blocked_tokens(masks: Sequence[bytes], vocab_size: int, device: torch.device) -> Tensor:
    """Bool ``[M, V]``: True for the tokens that a mask leaves out.

    Each mask has ``ceil(V / 8)`` bytes.
    """
    packed = torch.frombuffer(bytearray().join(masks), dtype=torch.uint8)  # [M * V/8]
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    places = torch.arange(8, dtype=torch.uint8, device=device)
    bits = packed.view(len(masks), -1, 1) >> places  # [M, V/8, 8]
    return (bits & 1).view(len(masks), -1)[:, :vocab_size] == 0
