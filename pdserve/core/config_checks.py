"""Checks that several sections of the cluster file share. Each raises ConfigError naming the key,
what was got and what is allowed.
"""

import difflib

from pdserve.core.errors import ConfigError

LONGEST_S = 1_000_000_000  # 31 years


def one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{key}: got {value!r}, allowed are {', '.join(allowed)}{hint}")


def at_least(key: str, value: float, least: float) -> None:
    if value < least:
        raise ConfigError(f"{key}: got {value}, allowed are {least} and more")


def at_most(key: str, value: float, most: float) -> None:
    if value > most:
        raise ConfigError(f"{key}: got {value}, allowed are at most {most}")


def a_time(key: str, value: float) -> None:
    """A time with which no clock or timer overflows."""
    at_most(key, value, LONGEST_S)


def above(key: str, value: float, bound: float) -> None:
    if value <= bound:
        raise ConfigError(f"{key}: got {value}, it must be more than {bound}")
