"""Which nodes may change their role, and what they are then."""

from dataclasses import fields, replace

import pytest

from pdserve.cluster.resolve import NodePlan
from pdserve.cluster.role_change import Capacity, changed, check_capacity
from pdserve.core.config import DecodeConfig, PrefillConfig, ResourcesConfig
from pdserve.core.errors import InvalidRequestError
from pdserve.core.node import NodeStanding, Role, Standing
from pdserve.core.orders import ChangeRole

PREFILL = NodePlan(name="prefill-0", role=Role.PREFILL, device="cpu", pool=PrefillConfig())
DECODE = NodePlan(name="decode-0", role=Role.DECODE, device="cpu", pool=DecodeConfig())
TEMPLATES = {Role.PREFILL: PREFILL, Role.DECODE: DECODE}
OF_THE_FRONT = {"replicas", "overtake_s", "enable_prefix_caching", "remeasure_idle_s"}


def standing(name: str, role: Role, standing: Standing = Standing.SERVING) -> NodeStanding:
    return NodeStanding(name=name, role=role, standing=standing)


OTHERS = (standing("prefill-1", Role.PREFILL), standing("decode-1", Role.DECODE))


def test_a_node_keeps_what_its_ranks_have_and_takes_the_rest_from_its_new_section() -> None:
    own = PrefillConfig(
        tensor_parallel_size=3,
        resources=ResourcesConfig(num_cpus=2.0),
        host_resource="fast",
        device="cpu",
        num_threads=5,
        max_num_batched_tokens=77,
        max_num_seqs=33,
        gpu_memory_utilization=0.4,
        kv_cache_bytes=12345,
        block_size=8,
        attention_backend="sdpa",
        overtake_s=9.0,
        enable_prefix_caching=False,
    )
    decode = DecodeConfig(local_prefill_tokens=31, fallback_chunk=17, headroom_tokens=5)
    templates = {**TEMPLATES, Role.DECODE: replace(DECODE, pool=decode)}
    before = replace(PREFILL, name="prefill-3", pool=own)
    after = changed(ChangeRole(node="prefill-3", role="decode"), before, templates, OTHERS)
    assert (after.name, after.role, after.device) == ("prefill-3", Role.DECODE, "cpu")
    assert isinstance(after.pool, DecodeConfig)
    common = {field.name for field in fields(PrefillConfig)}
    kept = common - OF_THE_FRONT
    assert kept <= {field.name for field in fields(DecodeConfig)}
    for field in fields(DecodeConfig):
        source = own if field.name in kept else decode
        assert getattr(after.pool, field.name) == getattr(source, field.name), field.name
    back = changed(ChangeRole(node="prefill-3", role="prefill"), after, templates, OTHERS)
    assert back == replace(before, pool=replace(own, overtake_s=2.0, enable_prefix_caching=True))


@pytest.mark.parametrize(
    ("plan", "role", "others", "problem"),
    [
        (DECODE, "router", OTHERS, "role: got 'router', allowed are prefill, decode"),
        (DECODE, "decode", OTHERS, "role: decode-0 is a decode node already"),
        (DECODE, "prefill", OTHERS[:1], "node: decode-0 is the last decode node that serves"),
        (
            DECODE,
            "prefill",
            (standing("decode-1", Role.DECODE, Standing.DRAINING),),
            "node: decode-0 is the last decode node that serves; nobody would decode",
        ),
        (
            DECODE,
            "prefill",
            (standing("decode-1", Role.DECODE, Standing.LOST),),
            "node: decode-0 is the last decode node that serves",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    plan: NodePlan, role: str, others: tuple[NodeStanding, ...], problem: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        changed(ChangeRole(node=plan.name, role=role), plan, TEMPLATES, others)
    assert str(refused.value).startswith(problem)


def test_the_last_prefill_node_may_leave_where_decode_nodes_prefill() -> None:
    order = ChangeRole(node="prefill-0", role="decode")
    assert changed(order, PREFILL, TEMPLATES, OTHERS[1:]).role is Role.DECODE
    pure = replace(DECODE, pool=DecodeConfig(local_prefill_tokens=0))
    with pytest.raises(
        InvalidRequestError, match=r"the last prefill node that serves; decode\.local"
    ):
        changed(order, PREFILL, {**TEMPLATES, Role.DECODE: pure}, OTHERS[1:])


def test_a_cluster_without_a_pool_gets_none_by_a_change_of_role() -> None:
    with pytest.raises(InvalidRequestError, match="started without prefill nodes"):
        changed(ChangeRole(node="decode-0", role="prefill"), DECODE, {Role.DECODE: DECODE}, OTHERS)


@pytest.mark.parametrize(
    ("own", "problem"),
    [
        (Capacity(max_model_len=511, max_choices=16), "node: p holds sequences of 511 tokens"),
        (Capacity(max_model_len=600, max_choices=15), "node: p takes requests of 15 choices"),
    ],
)
def test_a_decode_node_holds_what_the_others_promise(own: Capacity, problem: str) -> None:
    promised = Capacity(max_model_len=512, max_choices=16)
    check_capacity("p", promised, promised)
    with pytest.raises(InvalidRequestError) as refused:
        check_capacity("p", own, promised)
    assert str(refused.value).startswith(problem)
