"""The cluster files here are true: they load, and the default one says the defaults."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from pdserve.core.config import ClusterConfig
from pdserve.core.config_file import load_config

ROOT = Path(__file__).parents[2]


def keys(section: object) -> set[str]:
    """Dotted names of all keys below a section of the configuration."""
    found: set[str] = set()
    if not dataclasses.is_dataclass(section):
        return found
    for field in dataclasses.fields(section):
        below = keys(getattr(section, field.name))
        found |= {f"{field.name}.{key}" for key in below} or {field.name}
    return found


def keys_of_file(data: object) -> set[str]:
    if not isinstance(data, dict):
        return set()
    found: set[str] = set()
    for key, value in data.items():
        found |= {f"{key}.{below}" for below in keys_of_file(value)} or {key}
    return found


def test_the_default_file_says_what_holds_without_it() -> None:
    assert load_config(ROOT / "cluster.yaml") == ClusterConfig()


def test_the_default_file_shows_every_key() -> None:
    data = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    assert keys_of_file(data) == keys(ClusterConfig())


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_examples_load(path: Path) -> None:
    assert load_config(path) != ClusterConfig()
