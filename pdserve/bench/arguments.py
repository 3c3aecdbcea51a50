"""Numbers on the command lines of the benches, each bounded so that a slip is refused by name."""

import argparse
import math

MOST = 1_000_000  # requests, tokens of one, clients


def whole_number(text: str) -> int:
    """A whole number above 0."""
    if not text.isdigit() or not 1 <= int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 to {MOST}")
    return int(text)


def whole_numbers(text: str) -> tuple[int, ...]:
    """``"128,512"``; nothing for none."""
    return tuple(map(whole_number, text.split(","))) if text else ()


def amount(text: str) -> float:
    """A finite number above 0."""
    value = _number(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return value


def amounts(text: str) -> tuple[float, ...]:
    """``"20,10"``."""
    return tuple(map(amount, text.split(",")))


def rate(text: str) -> float:
    """Requests a second; ``inf``: all at once."""
    return math.inf if text == "inf" else amount(text)


def share(text: str) -> float:
    """Above 0, at most 1."""
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, at most 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
