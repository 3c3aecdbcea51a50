"""What holds for every policy, whatever the nodes say."""

from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.config import RouterConfig
from pdserve.core.cost import DecodeCost, LinkCost, NodeCosts, PrefillCost
from pdserve.core.routing_config import POLICY_NAMES, ConditionalConfig
from router.policy import POLICIES, DecodeLoad, Loads, PrefillLoad, Prompt, make_policy

COEFFICIENT = st.floats(0, 10)
PREFILL_COST = st.builds(PrefillCost, a=COEFFICIENT, b=COEFFICIENT, c=COEFFICIENT)
DECODE_COST = st.builds(DecodeCost, a=COEFFICIENT, b=COEFFICIENT, c=COEFFICIENT)
LINK_COST = st.builds(
    LinkCost, latency_s=COEFFICIENT, s_per_byte=COEFFICIENT, token_bytes=st.integers(1, 1000)
)
COSTS = st.builds(
    NodeCosts,
    prefill=st.none() | PREFILL_COST,
    decode=st.none() | DECODE_COST,
    link=st.none() | LINK_COST,
)
PREFILL_NAMES = ["prefill-0", "prefill-1", "prefill-2"]
DECODE_NAMES = ["decode-0", "decode-1", "decode-2"]


@st.composite
def some_loads(draw: st.DrawFn) -> Loads:
    count = st.integers(0, 5000)
    decode = tuple(
        DecodeLoad(
            name=name,
            num_requests=draw(count),
            free_blocks=draw(count),
            block_size=16,
            prefill_nodes=draw(st.frozensets(st.sampled_from(PREFILL_NAMES))),
            context_tokens=draw(count),
            queued_tokens=draw(count),
            prefill_chunk=draw(st.sampled_from([0, 1, 256])),
            costs=draw(COSTS),
        )
        for name in draw(st.lists(st.sampled_from(DECODE_NAMES), min_size=1, unique=True))
    )
    prefill = tuple(
        PrefillLoad(
            name=name, queued_tokens=draw(count), prefill_chunk=draw(count), costs=draw(COSTS)
        )
        for name in draw(st.lists(st.sampled_from(PREFILL_NAMES), unique=True))
    )
    return Loads(decode=decode, prefill=prefill)


PROMPTS = st.builds(
    Prompt,
    num_tokens=st.integers(1, 10_000),
    num_choices=st.integers(1, 4),
    cached=st.dictionaries(st.sampled_from(PREFILL_NAMES + DECODE_NAMES), st.integers(0, 20_000)),
    ttft_limit_s=st.none() | st.floats(0.001, 100),
    tpot_limit_s=st.none() | st.floats(0.001, 100),
)
CONFIGS = st.builds(
    RouterConfig,
    policy=st.sampled_from(POLICY_NAMES),
    local_prefill_below=st.integers(0, 200),
    conditional=st.builds(ConditionalConfig, enabled=st.booleans()),
)


@given(
    CONFIGS,
    st.booleans(),
    st.lists(
        st.tuples(PROMPTS, some_loads(), st.frozensets(st.sampled_from(DECODE_NAMES))),
        min_size=1,
        max_size=3,
    ),
)
def test_only_ready_connected_nodes_are_chosen_and_none_to_avoid_while_there_are_others(
    config: RouterConfig,
    prefill_configured: bool,
    asked: list[tuple[Prompt, Loads, frozenset[str]]],
) -> None:
    policy = make_policy(config, prefill_configured=prefill_configured)
    for prompt, loads, avoid in asked:
        decision = policy.choose(prompt, loads, avoid)
        assert decision == policy.choose(prompt, loads, avoid), "a question changes nothing"
        nodes = {node.name: node for node in loads.decode}
        chosen = nodes[decision.route.decode_node]
        assert chosen.name not in avoid or nodes.keys() <= avoid
        prefill = decision.route.prefill_nodes
        assert set(prefill) <= {node.name for node in loads.prefill} & chosen.prefill_nodes
        assert len(set(prefill)) == len(prefill)
        assert decision.place.is_local == (not prefill)
        if prefill:
            names = [c.name for c in config.classes]
            assert decision.route.lane == names.index(decision.prompt_class)
        if prompt.num_tokens < config.local_prefill_below or not prefill_configured:
            assert not prefill
        assert chosen.name in decision.explain
        policy.placed(prompt, decision)


@given(CONFIGS, PROMPTS, some_loads(), st.sampled_from(PREFILL_NAMES))
def test_a_prefill_node_that_failed_the_request_is_not_asked_first_while_there_are_others(
    config: RouterConfig, prompt: Prompt, loads: Loads, failed: str
) -> None:
    policy = make_policy(config, prefill_configured=True)
    first = policy.choose(prompt, loads, frozenset({failed})).route.prefill_nodes[:1]
    if first != (failed,):
        return
    decode = next(
        n
        for n in loads.decode
        if n.name == policy.choose(prompt, loads, frozenset({failed})).route.decode_node
    )
    others = {node.name for node in loads.prefill} & decode.prefill_nodes
    assert others == {failed}


def test_the_names_that_the_file_may_have_are_those_of_the_table() -> None:
    assert tuple(POLICIES) == POLICY_NAMES
