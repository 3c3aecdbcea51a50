"""The dashboard in ``examples/`` asks only for what a scrape of a router and its nodes has."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.nodes.scraped import scraped_site, scrapes
from tests.nodes.test_behind_a_router import ask
from tests.telemetry.scrape import Scrape
from tests.text.tiny_models import byte_level, save

EXAMPLES = Path(__file__).parents[2] / "examples" / "grafana"
METRIC = re.compile(r"\b(?:pdserve:\w+|process_\w+)")
SELECTOR = re.compile(r"(pdserve:\w+)\{([^}]*)\}")
BY = re.compile(r"by \(([^)]*)\)")
ADDED_BY_PROMETHEUS = {"job", "instance"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "tiny", byte_level())


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((EXAMPLES / "pdserve.json").read_text())
    return found


def queries() -> list[str]:
    targets = (panel.get("targets", []) for panel in dashboard()["panels"])
    return [target["expr"] for found in targets for target in found]


def labels_of(scraped: list[Scrape], metric: str) -> set[str]:
    samples = [sample for scrape in scraped for sample in scrape.samples if sample.name == metric]
    return {label for sample in samples for label in sample.labels} | ADDED_BY_PROMETHEUS


async def test_every_query_is_answered_by_a_scrape(model_dir: Path) -> None:
    async with scraped_site(model_dir) as (_, client):
        assert (await ask(client, max_tokens=3)).status_code == 200
        scraped = list((await scrapes(client)).values())
    names = {name for scrape in scraped for name in scrape.names}
    assert len(queries()) > 40
    for query in queries():
        metrics = METRIC.findall(query)
        assert metrics, query
        assert names.issuperset(metrics), query
        for metric, selector in SELECTOR.findall(query):
            wanted = {part.partition("=")[0].rstrip("~!") for part in selector.split(",")}
            assert labels_of(scraped, metric) >= wanted, query
        for by in BY.findall(query):
            has_samples = [labels_of(scraped, metric) for metric in metrics]
            known = set().union(*has_samples) - ADDED_BY_PROMETHEUS
            assert not known or known >= {label.strip() for label in by.split(",")}, query


def test_the_panels_do_not_overlap_and_each_says_what_it_shows() -> None:
    panels = dashboard()["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["type"] == "row" or panel["description"]
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_prometheus_is_told_to_find_the_nodes_through_the_router() -> None:
    config = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text())
    router, nodes = config["scrape_configs"]
    (static,) = router["static_configs"]
    (discovery,) = nodes["http_sd_configs"]
    assert discovery["url"] == f"http://{static['targets'][0]}/metrics/targets"
    assert all(job["job_name"].startswith("pdserve") for job in (router, nodes))
