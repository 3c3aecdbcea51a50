"""Reading ``cluster.yaml`` and the ``--set`` overrides into the dataclasses of ``config.py``,
once, at start.

An unknown key is an error that names the nearest known one; a wrong type names the key, what was
got and what is allowed.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pdserve.core.config import ClusterConfig
from pdserve.core.errors import ConfigError

LEAST_HUGE = 1 << 53  # no whole number from here on is exact everywhere; no key needs one


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> ClusterConfig:
    """Read a cluster file (None: all defaults) and apply ``key.path=value`` overrides in order.

    Values of overrides are YAML. Raises ConfigError naming file and key.
    """
    data = _read(path) if path is not None else {}
    for override in overrides:
        _apply_override(data, override)
    config = parse_config(data)
    return config


def parse_config(data: Mapping[str, Any]) -> ClusterConfig:
    """Turn nested mappings into a ClusterConfig. Raises ConfigError naming the key."""
    config = _build(ClusterConfig, data, "")
    assert isinstance(config, ClusterConfig)
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        data = _load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: no UTF-8, no such date
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, got {type(data).__name__}")
    return data


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override!r}: expected key.path=value")
    *parents, last = key.split(".")
    section = data
    for i, name in enumerate(parents):
        child = section.setdefault(name, {})
        if child is None:
            child = section[name] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"--set {key}: {'.'.join(parents[: i + 1])} is not a section")
        section = child
    try:
        section[last] = _load_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"--set {key}: {text!r} is not valid YAML: {error}") from error


def _load_yaml(text: str) -> Any:  # noqa: ANN401  (checked against the dataclasses)
    return yaml.load(text, Loader=_UniqueKeyLoader)


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that is given twice: YAML would silently forget the first."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[typing.Hashable, Any]:
        keys = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        names = [key.value for key in keys if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if names.count(key.value) > 1:
                problem = f"key {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
        return super().construct_mapping(node, deep)


def _build(cls: type, data: object, where: str) -> object:
    """Make a dataclass from a mapping; ``where`` is the dotted path so far."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where or 'cluster file'}: expected a mapping, got {_shown(data)}")
    hints = typing.get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls)]
    values = {}
    for key, value in data.items():
        path = f"{where}.{key}" if where else str(key)
        if key not in known:
            raise ConfigError(f"{path}: unknown key{_nearest(str(key), known, where)}")
        values[key] = _convert(hints[key], value, path)
    missing = [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
        and f.name not in values
    ]
    if missing:
        raise ConfigError(f"{where}.{missing[0]}: required, but not given")
    return cls(**values)


def _nearest(key: str, known: list[str], where: str) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    prefix = f"{where}." if where else ""
    if near:
        return f"; did you mean {prefix}{near[0]}?"
    return f"; known are {', '.join(prefix + name for name in known)}"


def _convert(hint: object, value: object, path: str) -> object:
    """Check ``value`` against a field's type; lists become tuples, mappings dataclasses."""
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return _build(hint, {} if value is None else value, path)
    if isinstance(hint, types.UnionType):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return None if value is None else _convert(inner[0], value, path)
    if typing.get_origin(hint) is tuple:
        return _convert_list(typing.get_args(hint), value, path)
    assert isinstance(hint, type)
    if type(value) is int and hint in (int, float) and abs(value) >= LEAST_HUGE:
        raise ConfigError(f"{path}: expected {_TYPE_WORDS[hint]}, got one beyond 2**53")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(f"{path}: expected {_TYPE_WORDS[hint]}, got {_shown(value)}")
    return value


def _convert_list(args: tuple[Any, ...], value: object, path: str) -> tuple[object, ...]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{path}: expected a list, got {_shown(value)}")
    if args[-1] is Ellipsis:
        return tuple(_convert(args[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if len(value) != len(args):
        raise ConfigError(f"{path}: expected {len(args)} values, got {len(value)}")
    return tuple(
        _convert(arg, item, f"{path}[{i}]")
        for i, (arg, item) in enumerate(zip(args, value, strict=True))
    )


_TYPE_WORDS = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def _shown(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"
