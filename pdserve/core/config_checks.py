"""Checks that several sections of the cluster file share. Each raises ConfigError naming the key,
what was got and what is allowed.
"""

import difflib

from pdserve.core.errors import ConfigError


def one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{key}: got {value!r}, allowed are {', '.join(allowed)}{hint}")


def at_least(key: str, value: float, least: float) -> None:
    if value < least:
        raise ConfigError(f"{key}: got {value}, allowed are {least} and more")


def above(key: str, value: float, bound: float) -> None:
    if value <= bound:
        raise ConfigError(f"{key}: got {value}, it must be more than {bound}")
