"""What router and nodes log of requests: ids on every line, texts on none."""

import logging
from pathlib import Path

import pytest

from tests.nodes.site import Site
from tests.nodes.test_behind_a_router import ask, router_of
from tests.text.tiny_models import byte_level, save

SECRET = "XYZZY-QWRTZ"  # of tokens that the fake model knows
OF_REQUESTS = ("router.dispatch", "decode_node.observer", "prefill_node.observer")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "tiny", byte_level())


async def test_each_process_names_the_request_and_none_its_prompt(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with Site() as site:
            await site.start_all("p0")
            async with router_of(site, model_dir) as client:
                body = {"prompt": SECRET, "max_tokens": 4, "ignore_eos": True, "stop": "QWRTZ"}
                first = await client.post("/v1/completions", json=body)
                assert first.status_code == 200, first.text
                await ask(client, max_tokens=2, user=SECRET)
                bad = {"prompt": SECRET, "temperature": -1, SECRET: 1}
                assert (await client.post("/v1/completions", json=bad)).status_code == 400
                await site.until_free()
    about = [record for record in caplog.records if record.name in OF_REQUESTS]
    for logger in OF_REQUESTS:
        assert len([record for record in about if record.name == logger]) == 2
    ids = {record.__dict__["request_id"] for record in about}
    assert len(ids) == 2
    assert all(record.__dict__["request_id"] in record.getMessage() for record in about)
    told = " ".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)
    assert not [word for word in SECRET.split("-") if word in told]
