"""Hosts that lack the model, or have another one, are named together, before anything runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.cluster.host_check import Wanted, check_hosts, hosts_for, problem_here
from pdserve.cluster.resolve import Hardware, Host, resolve
from pdserve.cluster.version import version
from pdserve.core.config_file import parse_config
from pdserve.core.errors import ModelFilesError
from pdserve.core.model_identity import ModelIdentity, identity_of
from tests.cluster.test_resolve import SMOLLM2

SOURCE = "/models/llama"
WANTED = Wanted(
    model_dir=Path(SOURCE), identity=ModelIdentity(config_digest="c", weights=()), version="1"
)


def a_host(name: str, **resources: float) -> Host:
    return Host(
        node_id=f"id-{name}", name=name, address="10.0.0.1", resources=tuple(resources.items())
    )


@dataclass
class FakeLookout:
    """Knows what is wrong."""

    known: dict[str, str]

    def problems(self, hosts: Sequence[Host], wanted: Wanted) -> Mapping[str, str]:
        return {host.node_id: self.known[host.name] for host in hosts if host.name in self.known}


def test_hosts_that_all_have_the_model_are_let_through() -> None:
    check_hosts([a_host("a"), a_host("b")], WANTED, FakeLookout({}), SOURCE)


def test_every_host_with_a_problem_is_named_in_one_message() -> None:
    lookout = FakeLookout({"a": "no such directory", "c": "another model"})
    with pytest.raises(ModelFilesError) as error:
        check_hosts([a_host(name) for name in "abc"], WANTED, lookout, SOURCE)
    head, *lines = str(error.value).splitlines()
    assert head.startswith("model.source: 2 of 3 hosts cannot serve '/models/llama'")
    assert WANTED.identity.fingerprint in head
    assert lines == ["  a (10.0.0.1): no such directory", "  c (10.0.0.1): another model"]


@pytest.mark.parametrize(
    ("pools", "names"),
    [
        ({}, ["cpus", "gpus"]),
        ({"prefill": {"replicas": 0}, "decode": {"resources": {"num_gpus": 1}}}, ["gpus"]),
        (
            {
                "prefill": {"replicas": 0},
                "decode": {"tensor_parallel_size": 3, "resources": {"num_cpus": 2}},
            },
            ["gpus"],
        ),
        (
            {"decode": {"host_resource": "big"}, "prefill": {"host_resource": "big"}},
            ["gpus"],
        ),
    ],
)
def test_only_hosts_that_are_large_enough_for_a_node_are_asked(
    pools: dict[str, object], names: list[str]
) -> None:
    hosts = (
        a_host("head", memory=1e9),
        a_host("cpus", CPU=4.0),
        a_host("gpus", CPU=16.0, GPU=8.0, big=1.0),
    )
    hardware = Hardware(num_cpus=20, num_gpus=8, num_hosts=3, hosts=hosts)
    network = {"interface": "eth0"}
    config = parse_config({"ray": {"address": "auto"}, "network": network, **pools})
    nodes = resolve(config, SMOLLM2, hardware).nodes
    assert [host.name for host in hosts_for(nodes, hosts)] == names


# ---- on the host that is asked --------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def wanted(model: Path, **changes: str) -> Wanted:
    return Wanted(model_dir=model, identity=identity_of(model), **{"version": version(), **changes})


def test_a_host_with_the_model_has_no_problem(model: Path) -> None:
    assert problem_here(wanted(model)) is None


def test_a_host_with_another_version_says_both(model: Path) -> None:
    assert problem_here(wanted(model, version="9.9")) == f"pdserve is {version()} there, 9.9 here"


def test_a_host_with_another_model_says_path_and_fingerprints(model: Path) -> None:
    asked = wanted(model)
    (model / "config.json").write_text('{"hidden_size": 1}')
    problem = problem_here(asked)
    assert problem is not None
    assert problem.startswith(f"{model}: fingerprint ")
    assert f"expected {asked.identity.fingerprint}" in problem
