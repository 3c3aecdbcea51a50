"""Server-sent events as bytes."""

import json

from hypothesis import given
from hypothesis import strategies as st

from router.answer_format import Json, TextEvents, event_bytes


def event(text: str) -> Json:
    return {"id": "a", "choices": [{"index": 0, "text": text, "finish_reason": None}]}


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_an_event_with_a_text_put_in_is_the_event_made_with_it(text: str) -> None:
    assert TextEvents(event).bytes_of(text) == event_bytes(event(text))
    assert json.loads(TextEvents(event).bytes_of(text)[len(b"data: ") :]) == event(text)
