"""Numbers about routing in the scrape."""

from router.policy import Place
from router.routing_metrics import RoutingMetrics


def test_every_rule_is_counted_from_the_start() -> None:
    metrics = RoutingMetrics()
    metrics.placed(Place.EARLIER)
    metrics.placed(Place.EARLIER)
    lines = list(metrics.lines())
    name = "pdserve:route_decisions_total"
    assert f'{name}{{planned="local",rule="earlier"}} 2' in lines
    assert f'{name}{{planned="disaggregated",rule="prefill_node"}} 0' in lines
    assert sum(line.startswith(f"{name}{{") for line in lines) == len(Place)


def test_errors_of_predictions_are_ratios_of_what_was_seen() -> None:
    metrics = RoutingMetrics()
    metrics.ttft_seen(0.3, 0.2)
    metrics.ttft_seen(0.2, 0.2)
    metrics.tpot_seen(0.01, 0.04)
    metrics.tpot_seen(0.01, 0.0)  # nothing was predicted
    lines = list(metrics.lines())
    assert 'pdserve:ttft_seen_over_predicted_bucket{le="1.1"} 1' in lines
    assert 'pdserve:ttft_seen_over_predicted_bucket{le="1.5"} 2' in lines
    assert "pdserve:tpot_seen_over_predicted_count 1" in lines
    assert "pdserve:tpot_seen_over_predicted_sum 0.25" in lines
