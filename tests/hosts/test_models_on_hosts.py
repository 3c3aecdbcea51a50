"""A host that has not the model of the others is found, and named, before any rank is started."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.models.fetch import fetch
from tests.cluster.served import PDSERVE
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """``missing`` and ``changed`` hold the model on the head, and something else on the other."""

    hosts: RayHosts
    missing: Path
    changed: Path

    def serve(self, model: Path) -> "subprocess.CompletedProcess[str]":
        """What `pdserve serve` says that cannot start."""
        settings = {
            "model.source": model,
            "ray.address": self.hosts.ray_address,
            "network.interface": INTERFACE,
            "router.host": self.hosts.head.address,
        }
        words = [f"--set={key}={value}" for key, value in settings.items()]
        command = self.hosts.head.command(
            *PDSERVE, "serve", "--name", self.hosts.head.namespace, *words
        )
        return subprocess.run(
            command,
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
    with two_hosts(head_cpus=3, other_cpus=2, other_sees=sees) as hosts:
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
    done = site.serve(site.missing)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "model.source: 1 of 2 hosts cannot serve" in done.stderr
    assert f"(10.77.0.2): {site.missing}/config.json: no such file" in done.stderr
    assert "prefill-0" not in done.stdout


def test_a_host_with_other_weights_is_named_with_what_it_has_and_should_have(site: Site) -> None:
    done = site.serve(site.changed)
    assert done.returncode == 2, done.stdout + done.stderr
    line = next(line for line in done.stderr.splitlines() if "(10.77.0.2): " in line)
    assert f"{site.changed}: fingerprint " in line
    assert line.endswith("model.safetensors has other weights")
    assert "decode-0" not in done.stdout
