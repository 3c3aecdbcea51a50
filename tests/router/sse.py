"""Reading server-sent events."""

import json
from typing import Any

import httpx


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """All events of a finished stream, which must end with [DONE]."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    """One choice's text, of completions or chat."""
    choices = [c for event in events for c in event["choices"] if c["index"] == index]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for choice in choices
    )
