"""A rank is told all that the cluster file says about it, where it listens among that."""

import shutil
import socket
import uuid
from pathlib import Path
from typing import Any

import pytest

from pdserve.cluster.incarnation import Incarnation, shared_dir
from pdserve.cluster.protection import Protection
from pdserve.cluster.rank_entry import check_model, rank_spec
from pdserve.cluster.resolve import Hardware, resolve
from pdserve.cluster.site import Site
from pdserve.core.config_file import parse_config
from pdserve.core.errors import ModelFilesError
from pdserve.core.model_identity import ModelIdentity
from tests.cluster.test_resolve import SMOLLM2

SECRET = "s3cret of this cluster"
PLACED: dict[str, Any] = {
    "run_token": "t",
    "log_folder": "test",
    "admin_token": "t0ken",
    "protection": Protection(secret=SECRET),
}
NETWORK = {"host": "127.0.0.2", "port_range": [20000, 20100]}


def test_a_rank_listens_where_its_host_is_reached_and_within_the_ports() -> None:
    config = parse_config({"network": NETWORK, "decode": {"tensor_parallel_size": 3}})
    cluster = resolve(config, SMOLLM2, Hardware(num_cpus=None, num_gpus=0))
    run_token = uuid.uuid4().hex
    site = Site(
        cluster=cluster,
        model_dir=Path("model"),
        model_identity=ModelIdentity(config_digest="f", weights=()),
        **PLACED | {"run_token": run_token},
    )
    plan = next(plan for plan in cluster.nodes if plan.name == "decode-0")
    incarnation = Incarnation(
        site=site, plan=plan, id="decode-0-1", start_timeout_s=1.0, step_timeout_s=1.0
    )
    try:
        spec = rank_spec(incarnation, 2, None)
    finally:
        shutil.rmtree(shared_dir(site.run_token))
    assert spec.access is not None
    assert spec.access.secret == SECRET
    assert SECRET not in repr(spec) + repr(site)
    assert (spec.host, spec.port_range) == ("127.0.0.2", (20000, 20100))
    assert (spec.engine.tp_size, spec.engine.tp_rank, spec.engine.device) == (3, 2, "cpu")


def test_a_rank_on_a_host_with_another_model_is_refused_by_host_and_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    site = Site(
        cluster=resolve(parse_config({}), SMOLLM2, Hardware(num_cpus=None, num_gpus=0)),
        model_dir=tmp_path,
        model_identity=ModelIdentity(config_digest="f", weights=()),
        **PLACED,
    )
    with pytest.raises(ModelFilesError, match=f"host {socket.gethostname()}: {tmp_path}: finger"):
        check_model(site)
