"""``best_of``: the answers with the highest mean log-probability are given, over HTTP and gRPC."""

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.request import FinishReason, Request, TokenLogprobs
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc
from pdserve.text.tokenizer import Tokenizer
from router.best_of import BestOf
from tests.router.conftest import World
from tests.router.fake_nodes import FakeDecodeNode, FakeSession

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORTH = (-2.0, -0.1, -3.0, -0.2)  # of choices 0 to 3


async def of_different_worth(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    """Choice ``c`` says token ``c``, once or twice, each time of the same log-probability."""
    for choice in request.choices:
        ids = [choice + 5] * (1 + choice % 2)
        finish = FinishReason.LENGTH
        session.say(request, choice, 0, ids, finish=finish, logprob=WORTH[choice])


def text(tokenizer: Tokenizer, choice: int) -> str:
    return tokenizer.decode([choice + 5] * (1 + choice % 2), skip_special_tokens=True)


async def test_the_likeliest_answers_are_given_best_first(
    world: World, tokenizer: Tokenizer
) -> None:
    world.decode[0].behave = of_different_worth
    answer = (await world.complete(n=2, best_of=4, max_tokens=2)).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, text(tokenizer, 1)),
        (1, text(tokenizer, 3)),
    ]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    assert answer["usage"]["completion_tokens"] == 6  # of all that were made
    assert world.decode[0].submitted[0].sampling.logprobs == 0


async def test_each_prompt_has_its_own_best(world: World, tokenizer: Tokenizer) -> None:
    world.decode[0].behave = of_different_worth
    fields = {"prompt": ["a", "b"], "best_of": 3, "max_tokens": 2, "logprobs": 1}
    answer = (await world.complete(**fields)).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, text(tokenizer, 1)),
        (1, text(tokenizer, 1)),
    ]
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.1, -0.1]


async def test_chats_have_it_too(world: World, tokenizer: Tokenizer) -> None:
    world.decode[0].behave = of_different_worth
    answer = (await world.chat(best_of=4, max_tokens=2)).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == [text(tokenizer, 1)]


async def test_over_grpc_the_best_come_whole(world: World, tokenizer: Tokenizer) -> None:
    world.decode[0].behave = of_different_worth
    sampling = pb.SamplingParams(n=2, best_of=4, max_tokens=2)
    async with grpc.aio.insecure_channel(world.router.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = pb.GenerateRequest(text="Hello", sampling=sampling)
        *answers, last = [message async for message in stub.Generate(request)]
    assert [(a.choice, a.text, a.finish_reason) for a in answers] == [
        (0, text(tokenizer, 1), "length"),
        (1, text(tokenizer, 3), "length"),
    ]
    assert last.usage.completion_tokens == 6


async def test_as_many_as_n_are_simply_given(world: World) -> None:
    answer = await world.complete(n=2, best_of=2, stream=True, max_tokens=2)
    assert answer.status_code == 200
    assert world.decode[0].submitted[0].sampling.logprobs is None


@given(st.lists(st.lists(st.floats(-50, 0), max_size=4), min_size=1, max_size=6), st.data())
async def test_nothing_that_is_left_out_is_better(
    worth: list[list[float]], data: st.DataObject
) -> None:
    num_given = data.draw(st.integers(1, len(worth)))
    answers = [tuple(TokenLogprobs(logprob=value) for value in each) for each in worth]
    chosen = BestOf(num_given=num_given, show_logprobs=False).choose(answers)
    means = [sum(each) / len(each) if each else float("-inf") for each in worth]
    left_out = set(range(len(worth))) - set(chosen)
    assert len(set(chosen)) == num_given
    assert all(means[a] >= means[b] for a in chosen for b in left_out)
