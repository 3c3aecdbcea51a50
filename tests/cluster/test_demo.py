"""The demo's checks and table, and the demo itself as `make demo` runs it."""

import re
import socket
import subprocess

import pytest

from pdserve.cluster.demo.answer import Answer, problems, stage_table
from pdserve.cluster.demo.questions import questions
from pdserve.core.request import RouteTaken
from pdserve.core.timeline import Stage, Timeline
from tests.cluster.served import PDSERVE

LOCAL = Timeline(
    route=RouteTaken.LOCAL, stages=(Stage(name="prefill", node="decode-0", duration_s=0.05),)
)
HANDED_OVER = Timeline(
    route=RouteTaken.DISAGGREGATED,
    stages=(
        Stage(name="prefill", node="prefill-0", duration_s=0.5),
        Stage(name="transfer", node="decode-0", duration_s=0.0123),
    ),
    kv_bytes=3 << 20,
    transport="grpc",
)


def answer(text: str, timeline: Timeline, completion_tokens: int = 5) -> Answer:
    return Answer(
        text=text,
        prompt_tokens=300,
        completion_tokens=completion_tokens,
        first_token_s=0.6,
        total_s=1.0,
        timeline=timeline,
    )


@pytest.mark.parametrize(
    ("question", "text", "timeline", "wrong"),
    [
        (0, "It is Paris.", LOCAL, []),
        (0, "It is Rome.", LOCAL, ["the answer does not hold 'Paris'"]),
        (0, "Paris", HANDED_OVER, ["the route was disaggregated, expected local"]),
        (1, "Ingrid Solberg", HANDED_OVER, []),
        (1, "Ingrid Solberg", LOCAL, ["the route was local, expected disaggregated"]),
        (
            2,
            "It is green.",
            Timeline(route=RouteTaken.DISAGGREGATED, stages=()),
            ["no KV bytes moved"],
        ),
    ],
)
def test_a_wrong_answer_or_way_is_named(
    question: int, text: str, timeline: Timeline, wrong: list[str]
) -> None:
    assert problems(questions()[question], answer(text, timeline)) == wrong


def test_the_questions_state_the_facts_they_ask_for() -> None:
    for question in questions()[1:]:
        assert question.answer_holds in question.content
        assert "  " not in question.content


def test_the_table_shows_stages_bytes_and_times() -> None:
    rows = [" ".join(line.split()) for line in stage_table(answer("", HANDED_OVER))]
    assert rows == [
        "route disaggregated 300 prompt tokens",
        "prefill 500.0 ms prefill-0",
        "transfer 12.3 ms decode-0",
        "KV moved 3.0 MiB over grpc, all there 12.3 ms after the first token was known",
        "first token 600.0 ms as the client saw it",
        "per token 100.0 ms 5 output tokens",
    ]


def test_one_output_token_has_no_time_per_token() -> None:
    assert "–" in list(stage_table(answer("", LOCAL, completion_tokens=1)))[-1]


@pytest.mark.ray
@pytest.mark.model
@pytest.mark.timeout(300)
def test_the_demo_shows_three_right_answers_on_other_ports_where_its_own_are_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*PDSERVE, "demo", f"--set=router.http_port={port}", "--set=router.grpc_port=0"],
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"127.0.0.1:{port} is taken; using another http_port" in done.stdout
    assert "The capital of France is Paris." in done.stdout
    assert re.findall(r"^  route +(\w+)", done.stdout, re.MULTILINE) == [
        "local",
        "disaggregated",
        "disaggregated",
    ]
    assert all(
        float(moved) > 1 for moved in re.findall(r"KV moved +([\d.,]+) MiB +over grpc", done.stdout)
    )
    assert done.stderr == ""
