"""The layers of pyproject.toml leave no module of ours out, so none escapes the contract."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_package_has_a_layer() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    placed = {name.strip("() ") for layer in layers for name in layer.split("|")}
    folders = {f"pdserve.{path.parent.name}" for path in ROOT.glob("pdserve/*/__init__.py")}
    modules = {f"pdserve.{path.stem}" for path in ROOT.glob("pdserve/*.py")} - {"pdserve.__init__"}
    others = set(settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) - {"pdserve"}
    assert (folders | modules | others) - placed == set()
