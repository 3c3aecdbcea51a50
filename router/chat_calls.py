"""Tool calls of one choice in OpenAI's form: deltas of a stream, or a whole message."""

import uuid

from pdserve.core.request import FinishReason
from pdserve.text.tool_parser import CallArguments, CallBegun, CallEvent, TextPiece, ToolParser
from router.answer_format import Json
from router.tool_use import CallRules


class ChoiceCalls:
    """The text of one choice, pushed as it comes."""

    def __init__(self, rules: CallRules) -> None:
        self._rules = rules
        self._parser = ToolParser(rules.written, rules.names, forced=rules.forced, most=rules.most)

    def deltas(self, text: str, *, is_last: bool) -> list[Json]:
        """What the next text adds to the message."""
        return [self._delta(event) for event in self.events(text, is_last=is_last)]

    def message(self, text: str) -> Json:
        """The whole message."""
        said, calls = "", list[Json]()
        for event in self.events(text, is_last=True):
            match event:
                case TextPiece(text=piece):
                    said += piece
                case CallBegun(name=name):
                    calls.append(self._call(name))
                case CallArguments(index=index, json=json):
                    function = calls[index]["function"]
                    assert isinstance(function, dict)
                    function["arguments"] += json
        message: Json = {"role": "assistant", "content": said or None, "refusal": None}
        return message | {"tool_calls": calls} if calls else {**message, "content": said}

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """OpenAI's word for an answer that ended with calls is another one."""
        return "tool_calls" if reason is FinishReason.STOP and self._parser.has_calls else reason

    def events(self, text: str, *, is_last: bool) -> list[CallEvent]:
        """What the next text says and calls."""
        events = self._parser.push(text)
        return [*events, *self._parser.flush()] if is_last else events

    def _delta(self, event: CallEvent) -> Json:
        match event:
            case TextPiece(text=text):
                return {"content": text}
            case CallBegun(index=index, name=name):
                return {"tool_calls": [{"index": index, **self._call(name)}]}
            case CallArguments(index=index, json=json):
                return {"tool_calls": [{"index": index, "function": {"arguments": json}}]}

    def new_id(self) -> str:
        """The id of another call, of the form that the model's template takes."""
        written = self._rules.written
        return written.call_id_prefix + uuid.uuid4().hex[: written.call_id_chars]

    def _call(self, name: str) -> Json:
        return {
            "id": self.new_id(),
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
