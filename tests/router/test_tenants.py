"""Whose call it is."""

import pytest

from router.tenants import NO_KEY, Tenants


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer  ", "Basic dXNlcjpwYXNz", "secret"])
def test_calls_without_a_bearer_key_share_one_tenant(header: str | None) -> None:
    assert Tenants().tenant_of(header) == NO_KEY


def test_a_key_names_one_tenant_and_is_not_to_be_read_from_it() -> None:
    tenants = Tenants()
    name = tenants.tenant_of("Bearer sk-secret")
    assert name == tenants.tenant_of("bearer  sk-secret ")
    assert name != tenants.tenant_of("Bearer sk-other")
    assert "secret" not in name


def test_another_process_gives_other_names() -> None:
    assert Tenants().tenant_of("Bearer k") != Tenants().tenant_of("Bearer k")


def test_a_key_of_any_bytes_is_a_key() -> None:
    assert Tenants().tenant_of("Bearer \udcff\udcfe") != NO_KEY
