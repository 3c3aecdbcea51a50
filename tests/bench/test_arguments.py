"""Numbers on a command line: what makes no sense is refused by what was got."""

import argparse
from collections.abc import Callable

import pytest

from pdserve.bench.arguments import amount, amounts, rate, share, whole_number, whole_numbers


@pytest.mark.parametrize(
    ("read", "text"),
    [
        *((whole_number, text) for text in ("0", "-1", "1.5", "x", "", "10000000000", "٣" * 9)),
        *((whole_numbers, text) for text in ("8,", "8;9", "1,0")),
        *((amount, text) for text in ("0", "-2", "nan", "inf", "x", "")),
        *((amounts, text) for text in ("", "1,", "1,nan")),
        *((rate, text) for text in ("0", "nan", "-inf")),
        *((share, text) for text in ("0", "1.1", "nan", "x")),
    ],
)
def test_nonsense_is_refused(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a"):
        read(text)


def test_good_numbers_are_read() -> None:
    assert whole_number("7") == 7
    assert whole_numbers("1,20") == (1, 20)
    assert whole_numbers("") == ()
    assert amount("0.5") == 0.5
    assert amounts("20,1e1") == (20.0, 10.0)
    assert rate("inf") == float("inf")
    assert share("1") == 1.0
