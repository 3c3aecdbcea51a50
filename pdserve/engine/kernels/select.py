"""Choosing the small operations of a rank."""

import torch

from pdserve.core.errors import ConfigError
from pdserve.engine.kernels import KERNELS
from pdserve.engine.kernels.interface import Kernels
from pdserve.engine.native.library import native_library
from pdserve.engine.plugin import load_plugin


def make_kernels(name: str, device: torch.device) -> Kernels:
    """The operations of that name; ``auto`` takes the fastest that run on this device."""
    if name == "auto":
        name = "native" if device.type == "cpu" and native_library() is not None else "torch"
    if name not in KERNELS:
        raise ConfigError(f"kernels: {name!r} is not one of auto, {', '.join(sorted(KERNELS))}")
    kernels: Kernels = load_plugin(KERNELS[name])()
    return kernels
