"""Choosing the attention backend of a rank."""

import logging

import torch

from pdserve.core.errors import ConfigError
from pdserve.engine.attention import ATTENTION_BACKENDS
from pdserve.engine.attention.interface import AttentionBackend, HeadShape, MakeBackend
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.native.library import native_library
from pdserve.engine.plugin import load_plugin

logger = logging.getLogger(__name__)


def make_backend(
    name: str, kv: KvCache, heads: HeadShape, device: torch.device
) -> AttentionBackend:
    """The backend of that name; ``auto`` takes the fastest that runs here. Raises ConfigError."""
    if name == "auto":
        name = _best(heads, device)
    if name not in ATTENTION_BACKENDS:
        known = ", ".join(sorted(ATTENTION_BACKENDS))
        raise ConfigError(f"attention_backend: {name!r} is not one of auto, {known}")
    logger.info("attention backend: %s", name)
    make: MakeBackend = load_plugin(ATTENTION_BACKENDS[name])
    return make(kv, heads)


def _best(heads: HeadShape, device: torch.device) -> str:
    if device.type == "cpu" and native_library() is not None and heads.head_size % 16 == 0:
        return "cpu_paged"
    return "sdpa"
