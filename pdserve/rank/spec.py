"""What a rank process is told at its start, in a form that can be shipped as JSON."""

import json
import types
import typing
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from pdserve.core.cluster_access import ClusterAccess
from pdserve.core.config import KvTransferConfig
from pdserve.core.errors import ConfigError
from pdserve.engine.engine_config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """One rank of one incarnation of a node; ``run_dir`` exists and serves only this one."""

    node: str
    peer_id: str  # the incarnation, as KV endpoints of other nodes know it
    run_dir: Path
    engine: EngineConfig
    kv_transfer: KvTransferConfig
    host: str  # where the KV endpoint listens, as other nodes reach it
    port_range: tuple[int, int] | None  # None: the system picks
    access: ClusterAccess | None = None  # None: whoever reaches the KV endpoint is let in
    start_timeout_s: float = 300.0  # for the front to appear, and for the ranks to meet
    report_timeout_s: float = 30.0  # for the front to make space in the out-ring

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=_plain)

    @classmethod
    def from_json(cls, text: str) -> "RankSpec":
        """Raises ConfigError if the text is no spec."""
        try:
            spec = _restore(cls, json.loads(text))
        except (ValueError, TypeError, LookupError) as error:
            raise ConfigError(f"rank spec: {error!r}") from error
        assert isinstance(spec, cls)
        return spec


def _plain(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _restore(hint: Any, value: Any) -> Any:  # noqa: ANN401 - any field's type and value
    """The value of a field as its type hint wants it: lists to tuples, mappings to dataclasses."""
    if hint is Path:
        return Path(value)
    if is_dataclass(hint) and isinstance(hint, type):
        hints = typing.get_type_hints(hint)
        return hint(**{f.name: _restore(hints[f.name], value[f.name]) for f in fields(hint)})
    if typing.get_origin(hint) is tuple:
        element = typing.get_args(hint)[0]
        return tuple(_restore(element, item) for item in value)
    if isinstance(hint, types.UnionType):
        return None if value is None else _restore(typing.get_args(hint)[0], value)
    return value
