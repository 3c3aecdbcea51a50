"""The router's bench: what it starts works, what it counts is right, what it prints is readable."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pdserve.bench.router.command import HEADER, AddedRow, StreamRow, row
from pdserve.bench.router.first_token import first_tokens
from pdserve.bench.router.processes import Setup, running
from pdserve.bench.router.streams import Asked, Counts, StreamClient, connect, count
from pdserve.core.errors import InternalError
from pdserve.text.tokenizer import Tokenizer
from tests.text.tiny_models import byte_level, save

TOKEN = "~"  # stands nowhere else in an answer


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = byte_level()
    directory = save(tmp_path_factory.mktemp("models") / "tiny", backend, eos_token="<|end|>")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": backend.get_vocab_size(),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 4096,
        "eos_token_id": backend.token_to_id("<|end|>"),
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("stream", [True, False])
async def test_answers_and_first_tokens_go_through_a_router_to_the_fake_node(
    model_dir: Path, stream: bool
) -> None:
    (token_id,) = Tokenizer(model_dir).encode(TOKEN, add_special_tokens=False)
    setup = Setup(
        model_dir=model_dir, token_id=token_id, step_s=0.001, router_core=None, other_core=None
    )
    with running(setup) as processes:
        host, _, port = processes.http_address.rpartition(":")
        asked = Asked(
            host=host, port=int(port), prompt="Hi", max_tokens=20, token_text=TOKEN, stream=stream
        )
        clients, counts = await connect(asked, 3)
        while counts.requests < 6:
            streamed = await count(clients, counts, 0.05)
            assert streamed.tokens >= streamed.events
        for client in clients:
            client.close()
        one = replace(asked, max_tokens=1, stream=True)
        times = await first_tokens(one, processes.node, [1, 2, 3], 3)
        assert len(times.routed_s) == len(times.direct_s) == 3
        assert processes.router_cpu_s() > 0
        assert processes.router_rss_mib() > 1


def read_in_cuts(answer: bytes, cut: int, *, stream: bool) -> tuple[StreamClient, Counts]:
    """A client who is given an answer of four tokens, so many bytes at a time."""
    counts = Counts()
    asked = Asked(host="h", port=1, prompt="", max_tokens=4, token_text=" the", stream=stream)
    client = StreamClient(asked, counts)
    for start in range(0, len(answer), cut):
        client.data_received(answer[start : start + cut])
    return client, counts


@pytest.mark.parametrize("cut", range(1, 60))
def test_tokens_of_whole_answers_are_counted_once_too(cut: int) -> None:
    answer = b'{"choices":[{"text":" the the the the"}],"usage":{"completion_tokens":4}}'
    client, counts = read_in_cuts(answer, cut, stream=False)
    assert (counts.tokens, counts.events, counts.requests, client.failed) == (4, 1, 1, None)


@pytest.mark.parametrize("cut", range(1, 60))
def test_tokens_and_events_are_counted_once_wherever_the_bytes_are_cut(cut: int) -> None:
    answer = b'data: {"text":" the the"}\n\ndata: {"text":" the"}\n\ndata: {"text":" the"}\n\n'
    client, counts = read_in_cuts(answer, cut, stream=True)
    assert (counts.tokens, counts.events) == (4, 3)
    client.data_received(b"data: [DONE]\n\n")
    assert (counts.events, counts.requests, client.failed) == (3, 1, None)


async def test_an_answer_with_too_few_tokens_is_no_result() -> None:
    asked = Asked(host="h", port=1, prompt="", max_tokens=2, token_text=" the", stream=True)
    client = StreamClient(asked, counts := Counts())
    client.data_received(b'data: {"text":" the"}\n\ndata: [DONE]\n\n')
    with pytest.raises(InternalError, match="1 tokens of 2"):
        await count([client], counts, 0.01)


def test_a_row_stands_under_its_header() -> None:
    item = StreamRow(
        streams=256,
        step_ms=0.0,
        offered=None,
        tokens_per_s=31_234.5,
        tokens_per_event=1.5,
        router_cpu=0.99,
        tokens_per_cpu_s=31_550.0,
        rss_before_mib=120.0,
        rss_after_mib=120.5,
    )
    assert len(row(item)) == len(HEADER)
    assert row(item).split() == (
        ["256", "0", "all", "31,234", "1.50", "0.99", "31,550", "120.0", "→", "120.5"]
    )
    assert json.dumps(asdict(item))
    assert json.dumps(asdict(AddedRow(requests=1, routed_ms=1.5, direct_ms=0.5, added_ms=1.0)))
