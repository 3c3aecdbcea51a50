"""Defaults of the cluster file and the values that it refuses, key by key."""

from typing import Any

import pytest

from pdserve.core.config import ClusterConfig, ModelConfig, PromptClass, RouterConfig
from pdserve.core.config_file import parse_config
from pdserve.core.errors import ConfigError


def refusal(section: str, value: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        parse_config({section: value})
    return str(error.value)


def test_an_empty_file_is_all_defaults():
    assert parse_config({}) == ClusterConfig()


def test_a_model_is_called_by_its_source_unless_it_is_given_a_name():
    assert ModelConfig(source="/models/llama-8b/").name == "llama-8b"
    assert ModelConfig(source="/models/llama-8b", served_name="chat").name == "chat"


def test_kv_has_the_type_of_the_model_unless_it_is_given_one():
    assert parse_config({"model": {"dtype": "bfloat16"}}).kv_dtype == "bfloat16"
    assert parse_config({"kv_cache": {"dtype": "float16"}}).kv_dtype == "float16"


BAD_VALUES = [
    ("model", "dtype", "float64", "float32, bfloat16, float16"),
    ("model", "load_format", "dumy", "auto, dummy; did you mean dummy?"),
    ("model", "max_model_len", 1, "2 and more"),
    ("model", "served_name", "", "clients need a name"),
    ("network", "silence_s", 1.5, "2 and more"),
    ("network", "silence_s", 1e300, "at most 1000000000"),
    ("network", "port_range", [2000, 1999], "ascending pair in 1024..65535"),
    ("network", "port_range", [80, 90], "ascending pair in 1024..65535"),
    ("network", "port_range", [1024, 65536], "ascending pair in 1024..65535"),
    ("prefill", "replicas", -1, "0 and more"),
    ("decode", "replicas", 0, "1 and more"),
    ("decode", "local_prefill_tokens", -1, "0 and more"),
    ("decode", "fallback_chunk", 0, "1 and more"),
    ("decode", "headroom_tokens", -1, "0 and more"),
    ("kv_cache", "dtype", "fp8", "auto, float32, bfloat16, float16"),
    ("kv_cache", "block_size", 0, "1 and more"),
    ("kv_transfer", "transport", "ncl", "auto, grpc, gloo, nccl, cuda_ipc; did you mean nccl?"),
    ("kv_transfer", "frame_bytes", 1000, "65536 to 268435456"),
    ("kv_transfer", "frame_bytes", 1 << 29, "65536 to 268435456"),
    ("kv_transfer", "staging_bytes", 1 << 10, "65536 and more"),
    ("kv_transfer", "nccl_channels", 0, "1 to 64"),
    ("kv_transfer", "nccl_channels", 65, "1 to 64"),
    ("kv_transfer", "timeout_s", 0, "more than 0"),
    ("kv_transfer", "timeout_s", 1e300, "at most 1000000000"),
    ("router", "http_port", -1, "0 to 65535"),
    ("router", "grpc_port", 65536, "0 to 65535"),
    ("router", "local_prefill_below", -1, "0 and more"),
]
POOL_VALUES = [
    ("tensor_parallel_size", 0, "1 and more"),
    ("replicas", 1025, "at most 1024"),
    ("num_threads", 0, "1 and more"),
    ("num_threads", 1025, "at most 1024"),
    ("max_num_batched_tokens", 0, "1 and more"),
    ("max_num_seqs", 0, "1 and more"),
    ("max_num_seqs", 1 << 40, "at most 65536"),
    ("kv_cache_bytes", 0, "1 and more"),
    ("block_size", 0, "1 and more"),
    ("overtake_s", -0.5, "0 and more"),
    ("overtake_s", 1e300, "at most 1000000000"),
    ("remeasure_idle_s", 0, "more than 0"),
    ("remeasure_idle_s", 1e300, "at most 1000000000"),
    ("device", "gpu", "auto, cpu, cuda"),
    ("gpu_memory_utilization", 0, "above 0, at most 1"),
    ("gpu_memory_utilization", 1.1, "above 0, at most 1"),
]
LIMIT_VALUES = [
    ("max_queued_requests", 0, "1 and more"),
    ("max_body_bytes", 0, "1 and more"),
    ("max_n", 0, "1 and more"),
    ("max_prompts", 0, "1 and more"),
    ("client_stall_s", 0, "more than 0"),
    ("request_timeout_s", -1.0, "more than 0"),
    ("queue_timeout_s", 0, "more than 0"),
    *((f"{name}_s", 1e300, "at most 1000000000") for name in ("client_stall", "request_timeout")),
    *((f"{name}_s", 1e300, "at most 1000000000") for name in ("queue_timeout", "priority_step")),
    ("priority_step_s", -1.0, "0 and more"),
    ("max_sent_ahead", -1, "0 and more"),
    ("max_prefill_wait_s", -0.1, "0 and more"),
    ("kv_watermark", 0, "above 0, at most 1"),
    ("kv_watermark", 1.5, "above 0, at most 1"),
]


@pytest.mark.parametrize(
    ("section", "key", "value", "allowed"),
    [*BAD_VALUES, *[(s, *row) for s in ("prefill", "decode") for row in POOL_VALUES]],
)
def test_a_value_out_of_range_names_its_key_and_what_is_allowed(
    section: str, key: str, value: object, allowed: str
):
    message = refusal(section, {key: value})
    assert message.startswith(f"{section}.{key}: ")
    assert allowed in message


@pytest.mark.parametrize(("key", "value", "allowed"), LIMIT_VALUES)
def test_a_limit_out_of_range_names_its_key_and_what_is_allowed(
    key: str, value: object, allowed: str
):
    message = refusal("router", {"limits": {key: value}})
    assert message.startswith(f"router.limits.{key}: ")
    assert allowed in message


@pytest.mark.parametrize("section", ["prefill", "decode"])
@pytest.mark.parametrize("key", ["num_cpus", "num_gpus"])
def test_resources_below_nothing_name_the_pool_that_asks_for_them(section: str, key: str):
    message = refusal(section, {"resources": {key: -1}})
    assert message == f"{section}.resources.{key}: got -1.0, allowed are 0 and more"


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("prefill", "replicas", 0),
        ("decode", "local_prefill_tokens", 0),
        ("decode", "headroom_tokens", 0),
        ("decode", "overtake_s", 0),
        ("router", "http_port", 0),
        ("router", "local_prefill_below", 0),
        ("network", "port_range", [1024, 65535]),
        ("prefill", "gpu_memory_utilization", 1),
    ],
)
def test_the_border_of_a_range_is_inside_it(section: str, key: str, value: object):
    parse_config({section: {key: value}})


def test_two_servers_can_not_listen_on_one_port_unless_the_system_picks():
    message = refusal("router", {"http_port": 9000, "grpc_port": 9000})
    assert message == "router.grpc_port: 9000 is router.http_port already"
    parse_config({"router": {"http_port": 0, "grpc_port": 0}})


@pytest.mark.parametrize(
    ("classes", "problem"),
    [
        ([], "the last class must have no `below`"),
        ([{"name": "a", "below": 5}], "the last class must have no `below`"),
        ([{"name": "a"}, {"name": "b"}], "ascend, got [None]"),
        ([{"name": "a", "below": 9}, {"name": "b", "below": 9}, {"name": "c"}], "got [9, 9]"),
        ([{"name": "a", "below": 9}, {"name": "b", "below": 4}, {"name": "c"}], "got [9, 4]"),
        ([{"name": "a", "below": 0}, {"name": "b"}], "above 0"),
        ([{"name": "a", "below": 3}, {"name": "a"}], "a name of its own, got ['a', 'a']"),
        ([{"name": ""}], "a name of its own"),
        ([{"name": " \t"}], "a name of its own"),
    ],
)
def test_classes_that_leave_a_prompt_without_one_class_are_refused(
    classes: list[dict[str, object]], problem: str
):
    message = refusal("router", {"classes": classes})
    assert message.startswith("router.classes: ")
    assert problem in message


@pytest.mark.parametrize(
    ("key", "value"), [("max_queued", 0), ("queue_timeout_s", 0), ("queue_timeout_s", 1e300)]
)
def test_bounds_of_a_class_are_refused_by_its_name(key: str, value: float):
    message = refusal("router", {"classes": [{"name": "all", key: value}]})
    assert message.startswith(
        f"router.classes.all.{key}: got {float(value) if key == 'queue_timeout_s' else value}"
    )


def test_classes_are_read_in_order_with_the_nodes_that_serve_them():
    config = parse_config(
        {
            "router": {
                "classes": [
                    {"name": "short", "below": 100, "prefill_nodes": ["prefill-0"]},
                    {"name": "rest"},
                ]
            }
        }
    )
    assert config.router == RouterConfig(
        classes=(
            PromptClass(name="short", below=100, prefill_nodes=("prefill-0",)),
            PromptClass(name="rest"),
        )
    )
