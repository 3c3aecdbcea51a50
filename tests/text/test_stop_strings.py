"""Stop strings: what is sent, what is held back, and that the cuts of the text do not matter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.text.stop_strings import StopStrings


def character_by_character(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The plain reference: after each character, look whether the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    finder = StopStrings(tuple(stops), include)
    sent = "".join(finder.push(piece) for piece in pieces)
    return sent + finder.flush(), finder.matched


letters = st.text(alphabet="abc", max_size=30)
stops_strategy = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


@given(pieces=st.lists(letters, max_size=8), stops=stops_strategy, include=st.booleans())
def test_any_cut_of_a_text_gives_the_same(pieces, stops, include):
    expected = character_by_character("".join(pieces), stops, include)
    assert run(pieces, stops, include) == expected
    assert run(["".join(pieces)], stops, include) == expected


@given(pieces=st.lists(letters, max_size=8), stops=stops_strategy)
def test_just_what_could_begin_a_stop_string_is_held_back(pieces, stops):
    finder, text, sent = StopStrings(tuple(stops)), "", ""
    for piece in pieces:
        text += piece
        sent += finder.push(piece)
        if finder.matched is not None:
            return
        open_ends = [
            end
            for end in (text[i:] for i in range(len(text)))
            if any(stop.startswith(end) and stop != end for stop in stops)
        ]
        assert sent == text.removesuffix(max(open_ends, key=len, default=""))


@pytest.mark.parametrize(
    ("pieces", "stops", "sent", "matched"),
    [
        (["Hello wor", "ld!"], [], "Hello world!", None),
        (["one\n", "\ntwo"], ["\n\n"], "one", "\n\n"),
        (["abcd"], ["bc", "abcd"], "a", "bc"),  # complete first
        (["xabc"], ["bc", "abc"], "x", "abc"),  # complete together: the longer
        (["aab"], ["ab"], "a", "ab"),
        (["ababac"], ["abac"], "ab", "abac"),
        (["a", "b", "c"], ["abcd"], "abc", None),
        (["stop"], ["stop"], "", "stop"),
        (["🇺", "🇳!"], ["🇺🇳"], "", "🇺🇳"),
        (["", "", ""], ["x"], "", None),
    ],
)
def test_the_text_ends_before_the_match(pieces, stops, sent, matched):
    assert run(pieces, stops) == (sent, matched)


def test_the_match_is_part_of_the_text_when_asked_for():
    assert run(["say STOP now"], ["STOP"], include=True) == ("say STOP", "STOP")


def test_nothing_comes_after_a_match():
    finder = StopStrings(("x",))
    assert finder.push("axb") == "a"
    assert finder.push("more") == ""
    assert finder.flush() == ""
    assert finder.matched == "x"


def test_text_is_sent_as_soon_as_it_cannot_be_a_stop_string():
    finder = StopStrings(("</end>",))
    assert [finder.push(piece) for piece in ["a <", "/e", "nd", "s> b"]] == [
        "a ",
        "",
        "",
        "</ends> b",
    ]
