"""The OpenAI routes over real HTTP, before a fake decode node."""

from tests.router.conftest import ANSWER, World


async def test_a_completion_has_text_usage_and_finish_reason(world: World) -> None:
    answer = (await world.complete(max_tokens=100, temperature=0)).json()
    (choice,) = answer["choices"]
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert choice["text"] == ANSWER
    assert choice["finish_reason"] == "stop"
    sent = world.decode[0].submitted[0]
    assert answer["usage"] == {
        "prompt_tokens": len(sent.token_ids),
        "completion_tokens": len(world.decode[0].answer_ids),
        "total_tokens": len(sent.token_ids) + len(world.decode[0].answer_ids),
    }
