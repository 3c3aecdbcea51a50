"""Tool calls out of an answer's text: whatever the cuts, the same text and the same calls."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.text.tool_parser import CallArguments, CallBegun, CallEvent, TextPiece, ToolParser
from pdserve.text.tools import TOOL_FORMATS

NAMES = frozenset({"f", "get_weather"})
F = '{"name": "f", "arguments": {"x": 1}}'
CALL_F = ("f", '{"x": 1}')
Read = tuple[str, list[tuple[str, str]]]


def read(
    written: str,
    pieces: list[str],
    *,
    forced: bool = False,
    most: int | None = None,
) -> Read:
    """The text and the calls of an answer that comes in pieces."""
    parser = ToolParser(TOOL_FORMATS[written], NAMES, forced=forced, most=most)
    events: list[CallEvent] = []
    for piece in pieces:
        events += parser.push(piece)
    events += parser.flush()
    text, calls = "", list[tuple[str, str]]()
    for event in events:
        match event:
            case TextPiece(text=said):
                text += said
            case CallBegun(index=index, name=name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index=index, json=arguments):
                assert index == len(calls) - 1, "a call's arguments come before the next call"
                calls[index] = (calls[index][0], calls[index][1] + arguments)
    assert parser.has_calls == bool(calls) or most is not None
    return text, calls


CASES: list[tuple[str, str, Read]] = [
    ("hermes", "Just text.", ("Just text.", [])),
    ("hermes", f"<tool_call>\n{F}\n</tool_call>", ("", [CALL_F])),
    ("hermes", f"I look.\n<tool_call>\n{F}\n</tool_call>\n", ("I look.", [CALL_F])),
    ("hermes", f"<tool_call>{F}</tool_call>\n<tool_call>{F}</tool_call>", ("", [CALL_F, CALL_F])),
    ("hermes", f"<tool_call>[{F}, {F}]</tool_call>", ("", [CALL_F, CALL_F])),
    ("hermes", f"<tool_call>{F}</tool_call> Done.", (" Done.", [CALL_F])),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"arguments": {}, "name": "f"}</tool_call>', ("", [("f", "{}")])),
    (
        "hermes",
        '<tool_call>{"id": [1, "}"], "name": "f", "arguments": {"a": "}\\""}}</tool_call>',
        ("", [("f", '{"a": "}\\""}')]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        ('<tool_call>{"name": "g", "arguments": {}}</tool_call>', []),
    ),
    ("hermes", "<tool_call>no JSON</tool_call>", ("<tool_call>no JSON</tool_call>", [])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x":', ("", [("f", '{"x":')])),
    ("hermes", '<tool_call>{"na', ('<tool_call>{"na', [])),
    ("hermes", "a <tool_ca", ("a <tool_ca", [])),
    ("hermes", "a < b \n", ("a < b \n", [])),
    ("hermes", f"<tool_call>\n{F}\n</tool_ca", ("", [CALL_F])),
    ("hermes", F, (F, [])),
    ("llama3_json", '{"name": "f", "parameters": {"x": 1}}', ("", [CALL_F])),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"x": 1}}', ("", [CALL_F])),
    ("llama3_json", f"{F}; {F}", ("", [CALL_F, CALL_F])),
    ("llama3_json", '{"name": "Bob"}', ('{"name": "Bob"}', [])),
    ("llama3_json", "Hello {there}", ("Hello {there}", [])),
    ("llama3_json", "[1, 2]", ("[1, 2]", [])),
    ("mistral", f"[TOOL_CALLS] [{F}, {F}]", ("", [CALL_F, CALL_F])),
    ("mistral", f"[TOOL_CALLS][{F}]", ("", [CALL_F])),
    ("mistral", "[1] is a source", ("[1] is a source", [])),
]


@pytest.mark.parametrize(("written", "answer", "expected"), CASES)
def test_text_and_calls_are_told_apart(written: str, answer: str, expected: Read) -> None:
    assert read(written, [answer]) == expected
    assert read(written, list(answer)) == expected


@pytest.mark.parametrize("written", TOOL_FORMATS)
@pytest.mark.parametrize("answer", [F, f"[{F}]", f"<tool_call>\n{F}\n</tool_call>"])
def test_a_forced_call_may_leave_the_opener_out(written: str, answer: str) -> None:
    if answer.startswith("<") and written != "hermes":
        return
    assert read(written, list(answer), forced=True) == ("", [CALL_F])


@pytest.mark.parametrize("depth", [1, 600, 5000])
def test_a_name_that_is_lists_in_lists_is_none(depth: int) -> None:
    answer = f'<tool_call>{{"name": {"[" * depth}{"]" * depth}, "arguments": {{}}}}</tool_call>'
    assert read("hermes", [answer]) == (answer, [])


def test_no_more_calls_than_wanted_are_told() -> None:
    answer = f"<tool_call>{F}</tool_call>" * 3
    assert read("hermes", [answer], most=1) == ("", [CALL_F])


def test_who_is_called_is_told_before_the_arguments_are_all_there() -> None:
    parser = ToolParser(TOOL_FORMATS["hermes"], NAMES, forced=False, most=None)
    assert parser.push('<tool_call>{"name": "f", "argu') == []
    assert parser.push('ments": {"x"') == [CallBegun(0, "f"), CallArguments(0, '{"x"')]
    assert parser.push(": 1") == [CallArguments(0, ": 1")]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@given(
    written=st.sampled_from(sorted(TOOL_FORMATS)),
    arguments=st.lists(st.dictionaries(st.text(max_size=4), json_values, max_size=3), min_size=1),
    said=st.sampled_from(["", "I look it up. ", "a < b", "{"]),
    data=st.data(),
)
def test_every_call_comes_back_as_it_was_written(written, arguments, said, data):
    form = TOOL_FORMATS[written]
    calls = [form.write("get_weather", each) for each in arguments]
    match written:
        case "hermes":
            answer = said + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
        case "llama3_json":
            said = ""
            answer = "; ".join(calls)
        case _:
            answer = f"{said}[TOOL_CALLS][{', '.join(calls)}]"
    cuts = sorted(data.draw(st.sets(st.integers(0, len(answer)), max_size=9)) | {0, len(answer)})
    pieces = [answer[a:b] for a, b in itertools.pairwise(cuts)]
    text, got = read(written, pieces)
    assert text == said.rstrip()
    assert [(name, json.loads(raw)) for name, raw in got] == [
        ("get_weather", each) for each in arguments
    ]


@given(st.sampled_from(sorted(TOOL_FORMATS)), st.text(alphabet='<tol_ca>/[]{}":, fname\\\n'))
def test_any_text_is_read_and_its_cuts_do_not_matter(written, answer):
    assert read(written, [answer]) == read(written, list(answer))
