"""The Kubernetes example is valid, and its parts agree: with each other, and with pdserve."""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.scripts.scripts import start as ray_start

from pdserve.cluster.host_check import hosts_for
from pdserve.cluster.resolve import ROUTER_CPUS, Hardware, Host, resolve
from pdserve.core.config import DecodeConfig, PrefillConfig
from pdserve.core.config_file import load_config
from router.http_access import PUBLIC
from tests.cluster.test_resolve import SMOLLM2
from tests.commands import check_command
from tests.deployment.ray_cluster_schema import RAY_CLUSTER

FOLDER = Path(__file__).parents[2] / "examples" / "kuberay"
KUBERNETES_VERSION = "1.37"
CONFIG = load_config(FOLDER / "cluster.yaml")
OBJECTS: dict[str, dict[str, Any]] = {
    f"{entry['kind']}/{entry['metadata']['name']}": entry
    for name in ("model.yaml", "pdserve.yaml")
    for entry in yaml.safe_load_all((FOLDER / name).read_text())
}
CLUSTER = OBJECTS["RayCluster/pdserve"]
SECRET, CONFIG_MAP = "pdserve", "pdserve"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The pods of one kind."""

    name: str
    replicas: int
    ray_start: dict[str, str]
    template: dict[str, Any]

    @property
    def container(self) -> dict[str, Any]:
        container: dict[str, Any] = self.template["spec"]["containers"][0]
        return container

    @property
    def resources(self) -> dict[str, float]:
        """What Ray makes of the pod: its limits, and what is said beside them."""
        limits = self.container["resources"].get("limits", {})
        requests = self.container["resources"]["requests"]
        more = json.loads(shlex.split(self.ray_start.get("resources", "{}"))[0] or "{}")
        return {
            "CPU": float(self.ray_start.get("num-cpus", limits.get("cpu", requests["cpu"]))),
            "GPU": float(limits.get("nvidia.com/gpu", 0)),
            **more,
        }


HEAD = Group(
    name="head",
    replicas=1,
    ray_start=CLUSTER["spec"]["headGroupSpec"]["rayStartParams"],
    template=CLUSTER["spec"]["headGroupSpec"]["template"],
)
GROUPS = {
    group["groupName"]: Group(
        name=group["groupName"],
        replicas=group["replicas"],
        ray_start=group["rayStartParams"],
        template=group["template"],
    )
    for group in CLUSTER["spec"]["workerGroupSpecs"]
}
PODS = [HEAD, *GROUPS.values()]
ROUTER = GROUPS["router"]


def named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (found,) = (entry for entry in entries if entry["name"] == name)
    return found


# ---- each object by its schema --------------------------------------------------------------


def test_the_ray_cluster_has_fields_that_kuberay_knows() -> None:
    jsonschema.validate(CLUSTER, RAY_CLUSTER)


@pytest.mark.parametrize(
    "change",
    [
        {"headGroupSpec": {}},
        {"workerGroupSpecs": [{"groupName": "g"}]},
        {"workerGroupSpecs": [CLUSTER["spec"]["workerGroupSpecs"][0] | {"replica": 1}]},
        {"rayStartParams": {}},
    ],
)
def test_the_schema_refuses_what_kuberay_would(change: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(CLUSTER | {"spec": CLUSTER["spec"] | change}, RAY_CLUSTER)


@pytest.mark.parametrize("name", [name for name in OBJECTS if name != "RayCluster/pdserve"])
def test_each_other_object_is_valid_for_kubernetes(name: str) -> None:
    kubernetes_validate.validate(OBJECTS[name], KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod.name)
def test_each_pod_is_valid_for_kubernetes(pod: Group) -> None:
    template = {"apiVersion": "v1", "kind": "PodTemplate", "template": pod.template}
    kubernetes_validate.validate(template, KUBERNETES_VERSION, strict=True)


def test_all_files_of_the_folder_belong_to_the_example() -> None:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    (generated,) = kustomization["configMapGenerator"]
    assert generated == {"name": CONFIG_MAP, "files": ["cluster.yaml"]}
    assert kustomization["resources"] == ["pdserve.yaml"]
    assert {path.name for path in FOLDER.iterdir()} == {
        "cluster.yaml", "kustomization.yaml", "model.yaml", "pdserve.yaml",
    }  # fmt: skip


# ---- pods and cluster file ------------------------------------------------------------------


def all_hosts() -> tuple[Host, ...]:
    return tuple(
        Host(
            node_id=f"{pod.name}-{i}",
            name=f"{pod.name}-{i}",
            address=f"10.0.0.{i}",
            resources=tuple(pod.resources.items()),
        )
        for pod in PODS
        for i in range(pod.replicas)
    )


def test_the_cluster_fits_into_the_pods() -> None:
    hosts = all_hosts()
    totals = {key: sum(dict(h.resources).get(key, 0.0) for h in hosts) for key in ("CPU", "GPU")}
    hardware = Hardware(
        num_cpus=totals["CPU"], num_gpus=totals["GPU"], num_hosts=len(hosts), hosts=hosts
    )
    nodes = resolve(CONFIG, SMOLLM2, hardware).nodes
    for role in ("prefill", "decode"):
        of_role = [plan for plan in nodes if plan.role == role]
        found = hosts_for(of_role, hosts)
        assert [host.name for host in found] == [f"{role}-{i}" for i in range(len(of_role))]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_pod_holds_one_node_and_is_for_its_role_alone(role: str) -> None:
    pool: PrefillConfig | DecodeConfig = getattr(CONFIG, role)
    offering = [pod.name for pod in PODS if pool.host_resource in pod.resources]
    assert offering == [role]
    assert GROUPS[role].replicas == pool.replicas
    assert GROUPS[role].resources["GPU"] == pool.resources.num_gpus * pool.tensor_parallel_size


def test_the_router_has_a_cpu_beside_it_and_the_head_has_none() -> None:
    assert HEAD.resources["CPU"] == 0
    (line,) = (line for line in ROUTER.container["args"][0].splitlines() if "ray start" in line)
    assert f"--num-cpus={ROUTER_CPUS:g}" in line.split()


# ---- commands, ports, probes, secrets -------------------------------------------------------


def test_the_routers_commands_are_taken_by_ray_and_by_pdserve() -> None:
    lines = [shlex.split(line) for line in ROUTER.container["args"][0].splitlines()]
    _, start, serve = lines
    assert start[:2] == ["ray", "start"]
    ray_start.make_parser(ray_start.make_context("ray start", [], resilient_parsing=True))
    ray_start.make_context("ray start", start[2:])
    assert serve[:2] == ["exec", "pdserve"]
    check_command(serve[1:])
    assert any(w == f"--address={CLUSTER['metadata']['name']}-head-svc:6379" for w in start)


def test_the_model_is_fetched_to_where_the_cluster_file_looks_for_it() -> None:
    container = OBJECTS["Job/pdserve-model"]["spec"]["template"]["spec"]["containers"][0]
    fetch, link = container["args"][0].splitlines()
    command = re.fullmatch(r"directory=\$\((pdserve .+)\)", fetch)
    assert command is not None
    check_command(shlex.split(command[1]))
    assert shlex.split(link)[-1] == CONFIG.model.source
    assert named(container["env"], "PDSERVE_CACHE")["value"] == "/models"


@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe", "readinessProbe"])
def test_probes_ask_routes_that_need_no_key_on_the_routers_port(probe: str) -> None:
    asked = ROUTER.container[probe]["httpGet"]
    assert asked["path"] == ("/ready" if probe == "readinessProbe" else "/health")
    assert asked["path"] in PUBLIC
    port = named(ROUTER.container["ports"], asked["port"])["containerPort"]
    assert port == CONFIG.router.http_port


def test_the_service_leads_to_the_routers_ports() -> None:
    service = OBJECTS["Service/pdserve"]["spec"]
    assert service["selector"] == {"ray.io/cluster": "pdserve", "ray.io/group": ROUTER.name}
    ports = {port["name"]: port["port"] for port in service["ports"]}
    assert ports == {"http": CONFIG.router.http_port, "grpc": CONFIG.router.grpc_port}
    for port in service["ports"]:
        named(ROUTER.container["ports"], port["targetPort"])


@pytest.mark.parametrize("pod", GROUPS.values(), ids=lambda pod: pod.name)
def test_pods_have_the_model_the_secrets_and_the_cluster_file_where_they_are_read(
    pod: Group,
) -> None:
    mounts = {m["mountPath"]: m["name"] for m in pod.container["volumeMounts"]}
    volumes = pod.template["spec"]["volumes"]
    assert (
        named(volumes, mounts["/models"])["persistentVolumeClaim"]["claimName"]
        == (OBJECTS["PersistentVolumeClaim/pdserve-models"]["metadata"]["name"])
    )
    assert CONFIG.model.source.startswith("/models/")
    assert named(volumes, mounts["/etc/pdserve/config"])["configMap"]["name"] == CONFIG_MAP
    assert named(volumes, mounts["/etc/pdserve/secrets"])["secret"]["secretName"] == SECRET
    for path in (CONFIG.security.api_keys_file, CONFIG.security.cluster_secret_file):
        assert path is not None
        assert str(Path(path).parent) in mounts


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod.name)
def test_only_who_has_the_token_may_use_ray(pod: Group) -> None:
    assert named(pod.container["env"], "RAY_AUTH_MODE")["value"] == "token"
    token = named(pod.container["env"], "RAY_AUTH_TOKEN")["valueFrom"]["secretKeyRef"]
    assert token == {"name": SECRET, "key": "ray-token"}


def test_a_stop_leaves_requests_the_time_that_the_router_gives_them() -> None:
    grace_s = float(re.findall(r"--grace-s (\d+)", ROUTER.container["args"][0])[0])
    assert ROUTER.template["spec"]["terminationGracePeriodSeconds"] >= grace_s + 20
