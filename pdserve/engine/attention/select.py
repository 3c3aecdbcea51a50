"""Choosing the attention backend of a rank."""

import logging
from collections.abc import Sequence

import torch

from pdserve.core.errors import ConfigError
from pdserve.core.plugin import load_plugin
from pdserve.engine.attention import ATTENTION_BACKENDS
from pdserve.engine.attention.by_step import ByStep
from pdserve.engine.attention.interface import AttentionBackend, HeadShape
from pdserve.engine.kv_cache import KvCache

logger = logging.getLogger(__name__)

FASTEST_FIRST = {"cpu": ("cpu_paged", "sdpa"), "cuda": ("triton", "flash_attn", "sdpa")}
BESIDE_DECODES = {"triton": ("flash_attn", "sdpa")}  # for the steps that such a backend cannot do


def make_backend(
    name: str, kv: KvCache, heads: HeadShape, device: torch.device
) -> AttentionBackend:
    """The backend of that name; ``auto`` takes the fastest that runs here. Raises ConfigError."""
    names = FASTEST_FIRST[device.type] if name == "auto" else (name,)
    what, backend = _first_that_runs(names, kv, heads)
    logger.info("attention backend: %s", what)
    return backend


def _first_that_runs(
    names: Sequence[str], kv: KvCache, heads: HeadShape
) -> tuple[str, AttentionBackend]:
    """What it is in words, and the backend."""
    *faster, last = names
    for name in faster:
        try:
            return _make(name, kv, heads)
        except ConfigError as error:
            logger.info("auto passes over %s: %s", name, error)
    return _make(last, kv, heads)


def _make(name: str, kv: KvCache, heads: HeadShape) -> tuple[str, AttentionBackend]:
    if name not in ATTENTION_BACKENDS:
        known = ", ".join(sorted(ATTENTION_BACKENDS))
        raise ConfigError(f"attention_backend: {name!r} is not one of auto, {known}")
    try:
        make = load_plugin(ATTENTION_BACKENDS[name])
    except ImportError as error:
        raise ConfigError(f"attention_backend: {name!r} needs a package: {error}") from error
    if name not in BESIDE_DECODES:
        return name, make(kv, heads)
    decodes = make(kv, heads)
    other, others = _first_that_runs(BESIDE_DECODES[name], kv, heads)
    return f"{name} for decode steps, {other} for all others", ByStep(decodes, others)
