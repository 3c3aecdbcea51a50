"""The output of one response while it grows: messages and calls, and the events that tell of them.

An item is open until the next one begins. Knows no numbers of events and no bytes.
"""

from dataclasses import dataclass, field

from router.answer_format import Json

Event = tuple[str, Json]


@dataclass(slots=True, kw_only=True)
class _Message:
    item_id: str
    status: str = "in_progress"
    text: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    @property
    def part(self) -> Json:
        return _text_part("".join(self.text), self.logprobs)

    def shown(self) -> Json:
        return {**self.begun(), "content": [self.part]}

    def begun(self) -> Json:
        """As the item is when nothing of it is said yet."""
        who: Json = {"id": self.item_id, "type": "message", "role": "assistant"}
        return {**who, "status": self.status, "content": []}


@dataclass(slots=True, kw_only=True)
class _Call:
    item_id: str
    call_id: str
    name: str
    status: str = "in_progress"
    arguments: list[str] = field(default_factory=list)

    def shown(self) -> Json:
        return {
            "id": self.item_id,
            "type": "function_call",
            "call_id": self.call_id,
            "name": self.name,
            "arguments": "".join(self.arguments),
            "status": self.status,
        }


class ResponseItems:
    """Each method that adds something returns the events of it."""

    def __init__(self, unique: str) -> None:
        self._unique = unique  # of all ids
        self._items: list[_Message | _Call] = []

    @property
    def output(self) -> list[Json]:
        """All items as they are now."""
        return [item.shown() for item in self._items]

    def begin_message(self) -> list[Event]:
        """The model is about to say something."""
        events = self._close("completed")
        message = _Message(item_id=self._new_id("msg"))
        self._items.append(message)
        events.append(self._of_item("added", message.begun()))
        events.append(self._of_part("content_part.added", message, {"part": _text_part("", [])}))
        return events

    def say(self, text: str, logprobs: list[Json]) -> list[Event]:
        """More of the open message, or of a new one."""
        events = [] if isinstance(self._open, _Message) else self.begin_message()
        message = self._open
        assert isinstance(message, _Message)
        message.text.append(text)
        message.logprobs += logprobs
        told: Json = {"delta": text, "logprobs": logprobs}
        return [*events, self._of_part("output_text.delta", message, told)]

    def call(self, name: str, call_id: str) -> list[Event]:
        """The next call begins."""
        events = self._close("completed")
        call = _Call(item_id=self._new_id("fc"), call_id=call_id, name=name)
        self._items.append(call)
        return [*events, self._of_item("added", call.shown())]

    def argue(self, json: str) -> list[Event]:
        """More of the open call's arguments."""
        call = self._open
        assert isinstance(call, _Call), "arguments belong to the latest call"
        call.arguments.append(json)
        return [self._of_call("delta", call, {"delta": json})]

    def end(self, status: str) -> list[Event]:
        """Nothing more comes; an answer of nothing is an empty message."""
        begun = [] if self._items else self.begin_message()
        return begun + self._close(status)

    @property
    def _open(self) -> _Message | _Call | None:
        return self._items[-1] if self._items else None

    def _new_id(self, kind: str) -> str:
        return f"{kind}_{self._unique}_{len(self._items)}"

    def _close(self, status: str) -> list[Event]:
        """The open item, where there is one, is as it will be."""
        if (item := self._open) is None:
            return []
        item.status = status
        if isinstance(item, _Call):
            told: Json = {"name": item.name, "arguments": "".join(item.arguments)}
            return [self._of_call("done", item, told), self._of_item("done", item.shown())]
        text: Json = {"text": "".join(item.text), "logprobs": item.logprobs}
        return [
            self._of_part("output_text.done", item, text),
            self._of_part("content_part.done", item, {"part": item.part}),
            self._of_item("done", item.shown()),
        ]

    def _of_item(self, what: str, item: Json) -> Event:
        place: Json = {"output_index": len(self._items) - 1}
        return f"response.output_item.{what}", {**place, "item": item}

    def _of_part(self, what: str, message: _Message, told: Json) -> Event:
        place: Json = {"item_id": message.item_id, "output_index": len(self._items) - 1}
        return f"response.{what}", {**place, "content_index": 0, **told}

    def _of_call(self, what: str, call: _Call, told: Json) -> Event:
        place: Json = {"item_id": call.item_id, "output_index": len(self._items) - 1}
        return f"response.function_call_arguments.{what}", {**place, **told}


def _text_part(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
