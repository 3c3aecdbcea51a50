"""API keys as they are kept, and what is no such line."""

import pytest

from pdserve.core.api_keys import find_key, hashed, line_of, new_key, parse_keys
from pdserve.core.errors import ConfigError


def test_a_key_is_found_and_stands_nowhere() -> None:
    keys = {name: new_key() for name in ("alice", "bob")}
    text = "\n".join(line_of(hashed(key, tenant=name)) for name, key in keys.items())
    kept = parse_keys(text, "file")
    for name, key in keys.items():
        found = find_key(kept, key)
        assert found is not None
        assert found.tenant == name
        assert key not in text
        assert key not in repr(kept)
    assert find_key(kept, new_key()) is None
    assert find_key(kept, "") is None


def test_lines_may_be_commented_repeated_and_operators() -> None:
    first, second = new_key(), new_key()
    lines = [
        "# who may call",
        "",
        line_of(hashed(first, tenant="alice")) + "  # until May",
        line_of(hashed(second, tenant="alice", is_operator=True)),
    ]
    kept = parse_keys("\n".join(lines), "file")
    assert [(key.tenant, key.is_operator) for key in kept] == [("alice", False), ("alice", True)]
    assert parse_keys(",".join(lines[2:3] * 2).replace("  # until May", ""), "variable")


@pytest.mark.parametrize(
    "line",
    [
        "alice sk-secret",
        "alice",
        "sk-secret",
        "alice sha256:abcd",
        f"alice md5:{'0' * 64}",
        f"alice sha256:{'0' * 64} admin",
        f"alice sha256:{'0' * 64} operator more",
        f"a/b sha256:{'0' * 64}",
    ],
)
def test_what_is_no_line_is_named_by_its_number_and_not_repeated(line: str) -> None:
    with pytest.raises(ConfigError, match="file, line 2: expected NAME sha256:HASH") as raised:
        parse_keys(f"# first\n{line}", "file")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "key", "words"),
    [
        ("", "k" * 40, "name of a key"),
        ("a b", "k" * 40, "name of a key"),
        ("a\nb", "k" * 40, "name of a key"),
        ("alice", "short", "key of alice: it has 5 characters, at least 32"),
    ],
)
def test_a_name_or_a_key_that_will_not_do_is_refused(name: str, key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        hashed(key, tenant=name)
    assert key not in str(raised.value)
