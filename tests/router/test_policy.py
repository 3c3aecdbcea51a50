"""Policies are made by the name in the cluster file."""

import pytest

from pdserve.core.config import RouterConfig
from pdserve.core.errors import ConfigError
from pdserve.core.routing_config import POLICY_NAMES
from router.policies.length import LengthPolicy
from router.policy import make_policy


def test_policies_are_made_by_name() -> None:
    assert isinstance(make_policy(RouterConfig(), prefill_configured=True), LengthPolicy)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_name_that_the_file_may_have_makes_a_policy(name: str) -> None:
    made = make_policy(RouterConfig(policy=name), prefill_configured=True)
    assert type(made).__name__.lower() == name.replace("_", "") + "policy"


def test_an_unknown_policy_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"router.policy: got 'lenght'.*did you mean length"):
        RouterConfig(policy="lenght")
