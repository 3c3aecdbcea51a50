"""Log lines as JSON."""

import json
import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.telemetry.json_log import JsonFormatter


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("router.dispatch", logging.INFO, "x.py", 1, message, (), None)
    made.__dict__.update(extra)
    return made


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(message=st.text(), label=st.text())
def test_whatever_is_said_is_one_line_and_comes_back_as_it_was(message: str, label: str) -> None:
    text = JsonFormatter("router").format(record(message.replace("%", ""), label=label))
    assert len(text.splitlines()) == 1 or "\n" not in text
    line = json.loads(text)
    assert (line["message"], line["label"]) == (message.replace("%", ""), label)
    assert (line["level"], line["logger"], line["process"]) == (
        "INFO",
        "router.dispatch",
        "router",
    )


def test_what_is_not_known_is_left_out_and_the_rest_keeps_its_type() -> None:
    line = json.loads(
        JsonFormatter("d").format(record("m", request_id="r", ttft_s=0.5, error=None))
    )
    assert (line["request_id"], line["ttft_s"]) == ("r", 0.5)
    assert line.keys() == {
        *("time", "level", "process", "logger", "message", "request_id", "ttft_s")
    }


def test_an_exception_is_in_the_same_line() -> None:
    try:
        raise ValueError("no")
    except ValueError as error:
        made = record("fault")
        made.exc_info = (type(error), error, error.__traceback__)
    text = JsonFormatter("d").format(made)
    assert "\n" not in text
    assert "ValueError: no" in json.loads(text)["exception"]


@pytest.mark.parametrize("value", [float("nan"), object(), {1, 2}])
def test_odd_values_do_not_lose_the_line(value: object) -> None:
    assert '"message": "m"' in JsonFormatter("d").format(record("m", odd=value))
