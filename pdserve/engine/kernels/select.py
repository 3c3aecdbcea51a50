"""Choosing the small operations of a rank."""

import logging

import torch

from pdserve.core.errors import ConfigError
from pdserve.core.plugin import load_plugin
from pdserve.engine.kernels import KERNELS
from pdserve.engine.kernels.interface import Kernels

logger = logging.getLogger(__name__)

FASTEST_FIRST = {"cpu": ("native", "torch"), "cuda": ("triton", "torch")}


def make_kernels(name: str, device: torch.device) -> Kernels:
    """The operations of that name; ``auto`` takes the fastest that run on this device."""
    if name == "auto":
        return _fastest(device)
    if name not in KERNELS:
        raise ConfigError(f"kernels: {name!r} is not one of auto, {', '.join(sorted(KERNELS))}")
    try:
        kernels: Kernels = load_plugin(KERNELS[name])()
    except ImportError as error:
        raise ConfigError(f"kernels: {name!r} needs a package: {error}") from error
    return kernels


def _fastest(device: torch.device) -> Kernels:
    *faster, last = FASTEST_FIRST[device.type]
    for name in faster:
        try:
            return make_kernels(name, device)
        except ConfigError as error:
            logger.info("auto passes over %s: %s", name, error)
    return make_kernels(last, device)
