"""Rotary position embedding: the table of angles, made once for all layers and steps."""

import math

import torch
from torch import Tensor

from pdserve.core.errors import UnsupportedModelError
from pdserve.core.model_spec import RopeSpec


def rope_table(
    rope: RopeSpec, *, head_size: int, num_positions: int, device: torch.device
) -> Tensor:
    """``[P, D]`` float32: for each position D/2 cosines, then D/2 sines.

    Raises UnsupportedModelError where the model scales its frequencies in a way not known here.
    """
    frequencies = _frequencies(rope, head_size)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def _frequencies(rope: RopeSpec, head_size: int) -> Tensor:
    """``[D/2]`` radians per position."""
    if rope.rotated_share != 1.0:
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor {rope.rotated_share} is not supported; "
            "whole heads are rotated"
        )
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies = 1.0 / rope.theta**exponents
    match rope.kind:
        case "default":
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _llama3(frequencies, rope)
        case _:
            raise UnsupportedModelError(
                f"config.json: rope_type {rope.kind!r} is not supported; "
                "known are 'default', 'linear' and 'llama3'"
            )


def _llama3(frequencies: Tensor, rope: RopeSpec) -> Tensor:
    """Llama 3.1's context extension: long waves stretched, short ones kept, the rest blended."""
    turns = rope.original_max_position * frequencies / (2 * math.pi)  # over the original context
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor
