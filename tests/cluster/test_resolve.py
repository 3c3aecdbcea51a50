"""What the cluster file leaves open is decided by model and hardware, and what cannot work is
refused by the key's name.
"""

from dataclasses import replace
from typing import Any

import pytest

from pdserve.cluster.resolve import Hardware, Host, ResolvedCluster, cpus_needed, resolve
from pdserve.core.config_file import parse_config
from pdserve.core.errors import ConfigError
from pdserve.core.model_spec import ModelSpec, RopeSpec

LAPTOP = Hardware(num_cpus=None, num_gpus=0)
GPU_HOST = Hardware(num_cpus=None, num_gpus=8)
ON_GPUS = {"resources": {"num_gpus": 1}}
SMOLLM2 = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_size=64,
    rms_norm_eps=1e-5,
    rope=RopeSpec(theta=1e5),
    tie_word_embeddings=True,
    max_position=8192,
    sliding_window=None,
    hidden_act="silu",
    attention_bias=False,
    mlp_bias=False,
    bos_token_id=1,
    eos_token_ids=(2,),
    fingerprint="f",
)


def resolved(data: dict[str, Any], hardware: Hardware = LAPTOP) -> ResolvedCluster:
    return resolve(parse_config(data), SMOLLM2, hardware)


def test_defaults_are_one_node_of_each_kind_on_the_cpu() -> None:
    cluster = resolved({})
    assert [(plan.name, plan.device) for plan in cluster.nodes] == [
        ("prefill-0", "cpu"),
        ("decode-0", "cpu"),
    ]
    assert (cluster.transport, cluster.max_model_len) == ("grpc", 8192)


@pytest.mark.parametrize(("num_hosts", "transport"), [(1, "cuda_ipc"), (2, "nccl")])
def test_ranks_with_gpus_run_on_them_two_steps_deep_and_move_kv_from_gpu_to_gpu(
    num_hosts: int, transport: str
) -> None:
    hardware = replace(GPU_HOST, num_hosts=num_hosts)
    cluster = resolved(
        {"prefill": ON_GPUS, "decode": ON_GPUS, "network": {"host": "10.0.0.1"}}, hardware
    )
    specs = [cluster.node_spec(plan, "i", "10.0.0.1") for plan in cluster.nodes]
    assert [plan.device for plan in cluster.nodes] == ["cuda", "cuda"]
    assert [(spec.depth, spec.transport) for spec in specs] == [(2, transport)] * 2


def test_cuda_ipc_is_for_one_host() -> None:
    data = {
        "prefill": ON_GPUS,
        "decode": ON_GPUS,
        "network": {"host": "10.0.0.1"},
        "kv_transfer": {"transport": "cuda_ipc"},
    }
    assert resolved(data, GPU_HOST).transport == "cuda_ipc"
    with pytest.raises(ConfigError, match="cuda_ipc works within one host, there are 2; use nccl"):
        resolved(data, replace(GPU_HOST, num_hosts=2))


def test_unlike_devices_move_kv_by_grpc() -> None:
    assert resolved({"prefill": ON_GPUS}, GPU_HOST).transport == "grpc"


def test_a_node_spec_holds_what_the_file_said() -> None:
    cluster = resolved(
        {
            "model": {"dtype": "bfloat16", "max_model_len": 1000},
            "prefill": {"block_size": 32},
            "kv_transfer": {"transport": "gloo"},
        }
    )
    prefill, decode = (cluster.node_spec(plan, "i", "10.0.0.1") for plan in cluster.nodes)
    assert (prefill.dtype, prefill.kv_dtype, prefill.max_model_len) == ("bfloat16",) * 2 + (1000,)
    assert (prefill.block_size, decode.block_size) == (32, 16)
    assert (prefill.transport, prefill.depth, prefill.host) == ("gloo", 1, "10.0.0.1")


def test_a_cluster_needs_cpus_for_ranks_fronts_and_router() -> None:
    cluster = resolved({"prefill": {"replicas": 2, "tensor_parallel_size": 3}})
    assert cpus_needed(cluster.nodes) == 2 * (1 + 3) + (1 + 1) + 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"prefill": {"tensor_parallel_size": 2}}, "prefill.tensor_parallel_size: 2 ranks .* 9"),
        ({"decode": {"tensor_parallel_size": 9}}, "decode.tensor_parallel_size: 9 ranks .* 1536"),
        ({"decode": {"kv_cache_bytes": 1000}}, "decode.kv_cache_bytes: 1000 hold no .* 737280"),
        ({"model": {"max_model_len": 9000}}, "model.max_model_len: got 9000, .* 8192"),
        ({"kv_transfer": {"transport": "nccl"}}, "kv_transfer.transport: nccl needs GPUs"),
        ({"kv_transfer": {"transport": "cuda_ipc"}}, "kv_transfer.transport: cuda_ipc needs GPUs"),
        ({"prefill": {"device": "cuda"}}, "prefill.device: cuda needs prefill.resources.num_gpus"),
        ({"decode": {"device": "cpu", **ON_GPUS}}, "decode.device: cpu, but"),
        ({"decode": {"resources": {"num_gpus": 2}}}, "raise decode.tensor_parallel_size"),
        ({"prefill": ON_GPUS}, "ask for 1 GPUs .* there are 0"),
        ({"decode": {"local_prefill_tokens": 0}}, "router.local_prefill_below: must be 0"),
        (
            {"decode": {"local_prefill_tokens": 0}, "prefill": {"replicas": 0}},
            "leaves nobody to prefill",
        ),
        ({"decode": {"local_prefill_tokens": 0}, "router": {"local_prefill_below": 0}}, None),
        ({"prefill": {"replicas": 0}}, None),
    ],
)
def test_what_cannot_work_is_refused_by_key(data: dict[str, Any], message: str | None) -> None:
    if message is None:
        resolved(data)
        return
    with pytest.raises(ConfigError, match=message):
        resolved(data)


@pytest.mark.parametrize(("prompt_tokens", "is_said"), [(512, False), (8192, True)])
def test_more_prompt_tokens_than_a_step_holds_are_warned_of(
    prompt_tokens: int, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    decode = {"local_prefill_tokens": prompt_tokens, "max_num_batched_tokens": 512}
    resolved({"decode": decode})
    said = "local_prefill_tokens: 8192 is more than a step holds" in caplog.text
    assert said == is_said


def test_a_ray_cluster_with_too_few_cpus_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"need 5 CPUs .* has 4"):
        resolved({}, Hardware(num_cpus=4, num_gpus=0))


def test_a_backend_that_does_not_exist_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"decode.attention_backend: got 'sdp'.* mean sdpa\?"):
        resolved({"decode": {"attention_backend": "sdp"}})


def test_caches_that_the_host_cannot_hold_are_refused() -> None:
    small = Hardware(num_cpus=None, num_gpus=0, memory_bytes=3 << 30)
    resolved({}, small)
    with pytest.raises(ConfigError, match=r"kv_cache_bytes: all ranks .* 4.0 GiB, .* has 3.0 GiB"):
        resolved({"decode": {"tensor_parallel_size": 3}}, small)


def test_loopback_is_refused_where_there_are_several_hosts() -> None:
    hosts = Hardware(num_cpus=64, num_gpus=0, num_hosts=3)
    with pytest.raises(ConfigError, match=r"network.host: 127.0.0.1 cannot be reached .* 2 hosts"):
        resolved({}, hosts)
    resolved({"network": {"interface": "eth0"}}, hosts)
    resolved({"network": {"host": "10.1.2.3"}}, hosts)


def a_host(*resources: str) -> Host:
    offered = tuple((name, 8.0) for name in ("CPU", *resources))
    return Host(node_id="n", name="n", address="10.0.0.1", resources=offered)


def test_a_host_resource_that_no_host_offers_is_refused_with_those_that_there_are() -> None:
    hosts = Hardware(num_cpus=64, num_gpus=0, hosts=(a_host("h100"), a_host("h200")))
    data = {"ray": {"address": "auto"}, "decode": {"host_resource": "h300"}}
    with pytest.raises(ConfigError, match=r"decode\.host_resource: .*'h300'.*CPU, h100, h200"):
        resolved(data, hosts)
    data["decode"] = {"host_resource": "h200"}
    assert resolved(data, hosts).nodes[-1].pool.host_resource == "h200"


def test_a_private_ray_has_no_hosts_to_choose_among() -> None:
    with pytest.raises(ConfigError, match=r"prefill\.host_resource: .*ray\.address is local"):
        resolved({"prefill": {"host_resource": "h200"}})
