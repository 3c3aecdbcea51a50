"""Choosing the attention backend of a rank."""

import logging

import torch

from pdserve.core.errors import ConfigError
from pdserve.core.plugin import load_plugin
from pdserve.engine.attention import ATTENTION_BACKENDS
from pdserve.engine.attention.interface import AttentionBackend, HeadShape, MakeBackend
from pdserve.engine.kv_cache import KvCache

logger = logging.getLogger(__name__)

FASTEST_FIRST = {"cpu": ("cpu_paged", "sdpa"), "cuda": ("flash_attn", "sdpa")}


def make_backend(
    name: str, kv: KvCache, heads: HeadShape, device: torch.device
) -> AttentionBackend:
    """The backend of that name; ``auto`` takes the fastest that runs here. Raises ConfigError."""
    if name == "auto":
        return _fastest(kv, heads, device)
    if name not in ATTENTION_BACKENDS:
        known = ", ".join(sorted(ATTENTION_BACKENDS))
        raise ConfigError(f"attention_backend: {name!r} is not one of auto, {known}")
    try:
        make: MakeBackend = load_plugin(ATTENTION_BACKENDS[name])
    except ImportError as error:
        raise ConfigError(f"attention_backend: {name!r} needs a package: {error}") from error
    backend = make(kv, heads)
    logger.info("attention backend: %s", name)
    return backend


def _fastest(kv: KvCache, heads: HeadShape, device: torch.device) -> AttentionBackend:
    *faster, last = FASTEST_FIRST[device.type]
    for name in faster:
        try:
            return make_backend(name, kv, heads, device)
        except ConfigError as error:
            logger.info("auto passes over %s: %s", name, error)
    return make_backend(last, kv, heads, device)
