"""What the cluster file may say about routing."""

import pytest

from pdserve.core.config_file import parse_config
from pdserve.core.errors import ConfigError
from pdserve.core.routing_config import POLICY_NAMES


def refusal(router: dict[str, object], **sections: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as error:
        parse_config({"router": router, **sections})
    return str(error.value)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_can_be_named(name: str) -> None:
    assert parse_config({"router": {"policy": name}}).router.policy == name


def test_an_unknown_policy_is_refused_when_the_file_is_read() -> None:
    message = refusal({"policy": "least_loaded"})
    assert message.startswith("router.policy: got 'least_loaded', allowed are length, least_load,")
    assert message.endswith("did you mean least_load?")


@pytest.mark.parametrize(
    ("num_prefill", "name", "there_are"),
    [(1, "prefill-1", "prefill-0"), (2, "prefil-0", "prefill-0, prefill-1"), (0, "x", "none")],
)
def test_a_class_may_only_name_prefill_nodes_that_there_are(
    num_prefill: int, name: str, there_are: str
) -> None:
    classes = [{"name": "short", "below": 9}, {"name": "all", "prefill_nodes": [name]}]
    message = refusal({"classes": classes}, prefill={"replicas": num_prefill})
    assert message == (
        f"router.classes[1].prefill_nodes: no prefill node is called {name!r}; "
        f"there are {there_are}"
    )


@pytest.mark.parametrize(
    ("section", "key", "value", "allowed"),
    [
        ("slo", "ttft_ms", 0, "0.001 and more"),
        ("slo", "ttft_ms", 1e9, "at most 86400000"),
        ("slo", "tpot_ms", -1.0, "0.001 and more"),
        ("slo", "tpot_ms", 5e-324, "0.001 and more"),
        ("prefix", "max_entries", -1, "0 and more"),
        ("prefix", "block_size", 0, "1 and more"),
        ("prefix", "load_gap", -1, "0 and more"),
        ("conditional", "margin", -0.1, "0 and more"),
        ("conditional", "max_local_tokens", 0, "1 and more"),
        ("conditional", "max_step_ms", 0.0, "more than 0"),
        ("conditional", "enabled", "on", "true or false"),
    ],
)
def test_a_value_out_of_range_names_its_key_and_what_is_allowed(
    section: str, key: str, value: object, allowed: str
) -> None:
    message = refusal({section: {key: value}})
    assert message.startswith(f"router.{section}.{key}: ")
    assert allowed in message
