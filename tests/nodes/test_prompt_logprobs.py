"""Log-probabilities of a prompt through router and nodes, prefilled there or here, moved or not."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.nodes.site import Site
from tests.nodes.test_behind_a_router import ALL_DISAGGREGATED, PROMPT, ask, router_of
from tests.text.tiny_models import byte_level, save


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "tiny", byte_level())


def told(choice: dict[str, list[dict[str, dict[str, float]] | None]]) -> list[float]:
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    return [
        item[str(token)]["logprob"]
        for item, token in zip(rest, PROMPT[1:], strict=True)
        if item is not None
    ]


@pytest.mark.parametrize(("below", "route"), [(0, "disaggregated"), (1000, "local")])
@pytest.mark.parametrize("num_choices", [1, 2])
async def test_every_chunk_of_the_prompt_is_told_of(
    model_dir: Path, below: int, route: str, num_choices: int
) -> None:
    async with Site() as site:
        await site.start_all("p0")
        config = replace(ALL_DISAGGREGATED, local_prefill_below=below)
        async with router_of(site, model_dir, config) as client:
            for _ in range(2):  # the second time the prefix cache would have it all
                call = ask(client, max_tokens=3, prompt_logprobs=2, n=num_choices, timeline=True)
                answer = (await call).json()
                for choice in answer["choices"]:
                    assert told(choice) == [-0.25 - token for token in PROMPT[1:]]
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
                assert answer["timeline"]["route"] == route
            await site.until_free()
