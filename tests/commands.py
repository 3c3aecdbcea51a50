"""Commands in texts and examples, tried on the parser of `pdserve` without being run."""

from collections.abc import Sequence

from pdserve.cli import parser_for


def check_command(words: Sequence[str]) -> None:
    """Raises AssertionError where `pdserve` would not take ``words[1:]``; ``--help`` is taken."""
    assert words[0] == "pdserve", words
    try:
        parser_for(words[1:]).parse_args(words[1:])
    except SystemExit as end:
        if end.code:
            raise AssertionError(f"pdserve does not take {' '.join(words)!r}") from end
