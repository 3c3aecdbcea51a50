"""Each example is a cluster that can be, on the hardware that its README names for it."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from pdserve.cluster.resolve import Hardware, Host, resolve
from pdserve.core.config_file import load_config
from pdserve.core.model_spec import ModelSpec
from tests.cluster.test_resolve import SMOLLM2
from tests.commands import check_command

FOLDER = Path(__file__).parents[2] / "examples"
README = (FOLDER / "README.md").read_text()
FILES = sorted(FOLDER.rglob("*.yaml"))
CLUSTER_FILES = sorted(path for path in FILES if path.parent == FOLDER)
LLAMA_8B = dataclasses.replace(
    SMOLLM2,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
)
LAPTOP = Hardware(num_cpus=None, num_gpus=0, memory_bytes=16 << 30)
TWO_HOSTS = tuple(
    Host(node_id=name, name=name, address=name, resources=(("CPU", 64.0), ("GPU", 8.0)))
    for name in ("a", "b")
)
NEEDS = {
    "colocated": (SMOLLM2, LAPTOP),
    "h200-1p1d": (LLAMA_8B, Hardware(num_cpus=None, num_gpus=2)),
    "one_host_gpus": (LLAMA_8B, Hardware(num_cpus=None, num_gpus=8)),
    "secured": (SMOLLM2, LAPTOP),
    "several_hosts": (
        LLAMA_8B,
        Hardware(num_cpus=128, num_gpus=16, num_hosts=2, hosts=TWO_HOSTS),
    ),
    "unequal_tp": (SMOLLM2, LAPTOP),
}


def test_each_example_is_tried() -> None:
    assert [path.stem for path in CLUSTER_FILES] == sorted(NEEDS)


@pytest.mark.parametrize("path", CLUSTER_FILES, ids=lambda path: path.stem)
def test_an_example_is_a_cluster_that_its_hardware_can_be(path: Path) -> None:
    model: ModelSpec
    model, hardware = NEEDS[path.stem]
    cluster = resolve(load_config(path), model, hardware)
    assert cluster.nodes


@pytest.mark.parametrize(
    ("name", "num_gpus"), [("h200-1p1d", 2), ("one_host_gpus", 8), ("several_hosts", 16)]
)
def test_the_readme_says_how_many_gpus_an_example_takes(name: str, num_gpus: int) -> None:
    config = load_config(FOLDER / f"{name}.yaml")
    pools = (config.prefill, config.decode)
    taken = [p.replicas * p.tensor_parallel_size * p.resources.num_gpus for p in pools]
    assert sum(taken) == num_gpus
    assert re.search(rf"\| `{name}\.yaml` .* \| {num_gpus} GPUs \|", README)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_the_readme_says_when_to_use_which(path: Path) -> None:
    named = path.name if path.parent == FOLDER else f"{path.parent.name}/"
    assert f"`{named}`" in README


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_commands_in_comments_are_taken(path: Path) -> None:
    for line in path.read_text().splitlines():
        if match := re.match(r"#\s+(pdserve [^#]+?)(\s{3,}.*)?$", line):
            check_command(shlex.split(match[1]))
