"""A host that has not the model of the others is found, and named, before any rank is started; and
nodes go to hosts that offer what they are to have.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.models.fetch import fetch
from tests.cluster.served import PDSERVE, START_TIMEOUT_S, Served
from tests.hosts.namespaces import INTERFACE, POSSIBLE, RayHosts, two_hosts

pytestmark = [
    pytest.mark.ray,
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not POSSIBLE, reason="network namespaces need root and `ip`"),
]

NAME = "smollm2-135m-instruct"
SERVE_TIMEOUT_S = 240.0
OFFERS = '{"bandwidth": 1}'  # of the other host


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """``missing`` and ``changed`` hold the model on the head, and something else on the other."""

    hosts: RayHosts
    missing: Path
    changed: Path

    def command(self, settings: dict[str, object]) -> list[str]:
        """`pdserve serve` on the head."""
        settings = {
            "ray.address": self.hosts.ray_address,
            "network.interface": INTERFACE,
            "router.host": self.hosts.head.address,
            **settings,
        }
        words = [f"--set={key}={value}" for key, value in settings.items()]
        return self.hosts.head.command(
            *PDSERVE, "serve", "--name", self.hosts.head.namespace, *words
        )

    def serve(self, settings: dict[str, object]) -> "subprocess.CompletedProcess[str]":
        """What `pdserve serve` says that cannot start."""
        return subprocess.run(
            self.command(settings),
            capture_output=True,
            text=True,
            env=self.hosts.env,
            check=False,
            timeout=SERVE_TIMEOUT_S,
        )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("models")
    paths = {name: a_copy(folder / name) for name in ("missing", "changed")}
    empty = folder / "empty"
    empty.mkdir()
    other_weights = change(a_copy(folder / "other-weights"))
    sees = {paths["missing"]: empty, paths["changed"]: other_weights}
    with two_hosts(head_cpus=3, other_cpus=2, other_sees=sees, other_offers=OFFERS) as hosts:
        yield Site(hosts=hosts, missing=paths["missing"], changed=paths["changed"])


def a_copy(directory: Path) -> Path:
    shutil.copytree(fetch(NAME), directory, copy_function=os.link)
    return directory


def change(model: Path) -> Path:
    """Give it the weights of another training: as many, elsewhere."""
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    weights.unlink()  # not in the model that it is linked to
    half = len(content) // 2
    content[half:] = bytes(value ^ 1 for value in content[half:])
    weights.write_bytes(content)
    return model


def test_a_host_without_the_model_is_named_with_the_path(site: Site) -> None:
    done = site.serve({"model.source": site.missing})
    assert done.returncode == 2, done.stdout + done.stderr
    assert "model.source: 1 of 2 hosts cannot serve" in done.stderr
    assert f"(10.77.0.2): {site.missing}/config.json: no such file" in done.stderr
    assert "prefill-0" not in done.stdout


def test_a_host_with_other_weights_is_named_with_what_it_has_and_should_have(site: Site) -> None:
    done = site.serve({"model.source": site.changed})
    assert done.returncode == 2, done.stdout + done.stderr
    line = next(line for line in done.stderr.splitlines() if "(10.77.0.2): " in line)
    assert f"{site.changed}: fingerprint " in line
    assert line.endswith("model.safetensors has other weights")
    assert "decode-0" not in done.stdout


def test_a_resource_that_no_host_offers_is_refused_with_those_that_there_are(site: Site) -> None:
    done = site.serve({"decode.host_resource": "compute"})
    assert done.returncode == 2, done.stdout + done.stderr
    assert "decode.host_resource: no host of the Ray cluster offers 'compute'" in done.stderr
    assert "bandwidth" in done.stderr


def test_a_node_goes_to_a_host_that_offers_what_it_is_to_have(site: Site) -> None:
    process = subprocess.Popen(
        site.command({"decode.host_resource": "bandwidth"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=site.hosts.env,
    )
    cluster = Served(process)
    try:
        address = cluster.wait_for(r"decode-0 +([\d.]+):\d+", START_TIMEOUT_S)[1]
    finally:
        cluster.stop()
    assert address == site.hosts.other.address
