"""The answers of /v1/responses in OpenAI's form: one object, or a stream of named events.

The items of the output are in ``response_items.py``. The events of a stream are numbered, and each
names its type twice, as OpenAI's do; the stream has no [DONE].
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic_core import to_json

from pdserve.core.errors import PdserveError
from pdserve.core.request import FinishReason
from pdserve.text.tokenizer import Tokenizer
from pdserve.text.tool_parser import CallArguments, CallBegun, TextPiece
from router.answer_format import Json, json_logprob, timeline_json
from router.chat_calls import ChoiceCalls
from router.choice_text import Delta
from router.generation import Generation, GenerationRequest, Usage
from router.response_items import Event, ResponseItems

STATUS_OF = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.ABORT: "cancelled",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesOptions:
    """What the client asked for, beyond tokens. ``said``: its fields that the answer repeats."""

    streamed: bool
    timeline: bool
    said: Mapping[str, object]


class ResponsesFormat:
    """One response."""

    def __init__(
        self,
        *,
        unique: str,
        model: str,
        created_s: int,
        tokenizer: Tokenizer,
        request: GenerationRequest,
        options: ResponsesOptions,
    ) -> None:
        self._head: Json = {
            "id": f"resp_{unique}",
            "object": "response",
            "created_at": created_s,
            "model": model,
        }
        self._tokenizer = tokenizer
        self._options = options
        self._items = ResponseItems(unique)
        self._calls = None if request.calls is None else ChoiceCalls(request.calls)
        # Where calls may come: of tokens whose text may turn out to be one.
        self._held_logprobs: deque[tuple[Json, int]] = deque()  # with the bytes of each token
        self._has_called = False
        self._untold_bytes = 0  # of text that is said; below 0: a token reaches beyond it
        self._num_events = 0
        self._finish: FinishReason | None = None

    @property
    def streamed(self) -> bool:
        return self._options.streamed

    def whole(self, answers: Sequence[Delta], generation: Generation) -> Json:
        self._take(answers[0])
        self._items.end(self._item_status())
        return self._over(generation)

    def events(self, delta: Delta) -> bytes:
        begun = b"" if self._num_events else self._begin()
        return begun + self._bytes_of(self._take(delta))

    def ending(self, generation: Generation) -> bytes:
        ends = self._bytes_of(self._items.end(self._item_status()))
        over = self._over(generation)
        last = "incomplete" if over["status"] == "incomplete" else "completed"
        return ends + self._event(f"response.{last}", {"response": over})

    def failure(self, error: PdserveError) -> bytes:
        failed: Json = {"code": "server_error", "message": str(error)}
        self._items.end("incomplete")
        response = self._response("failed", output=self._items.output, error=failed)
        return self._event("response.failed", {"response": response})

    def _begin(self) -> bytes:
        told: Json = {"response": self._response("in_progress", output=[])}
        begun = [("response.created", told), ("response.in_progress", told)]
        # Where calls may come, what the first item is shows later.
        message = self._items.begin_message() if self._calls is None else []
        return self._bytes_of([*begun, *message])

    def _bytes_of(self, events: Sequence[Event]) -> bytes:
        return b"".join(self._event(name, content) for name, content in events)

    def _event(self, name: str, content: Json) -> bytes:
        data = to_json({"type": name, "sequence_number": self._num_events, **content})
        self._num_events += 1
        return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"

    def _take(self, delta: Delta) -> list[Event]:
        """Put what a delta says where it belongs."""
        self._finish = delta.finish_reason
        logprobs = self._logprobs(delta)
        if self._calls is None:
            return self._items.say(delta.text, logprobs) if delta.text or logprobs else []
        return self._take_with_calls(self._calls, delta, logprobs)

    def _take_with_calls(
        self, calls: ChoiceCalls, delta: Delta, logprobs: list[Json]
    ) -> list[Event]:
        """Log-probabilities are told of what is said before the first call."""
        sizes = [len(self._tokenizer.token_bytes(token_id)) for token_id in delta.token_ids]
        self._held_logprobs.extend(zip(logprobs, sizes, strict=False))
        is_last = delta.finish_reason is not None
        events: list[Event] = []
        for event in calls.events(delta.text, is_last=is_last):
            match event:
                case TextPiece(text=text):
                    told = [] if self._has_called else self._logprobs_of(text)
                    events += self._items.say(text, told)
                case CallBegun(name=name):
                    self._has_called = True
                    events += self._items.call(name, calls.new_id())
                case CallArguments(json=json):
                    events += self._items.argue(json)
        if is_last and self._held_logprobs and not self._has_called:
            events += self._items.say("", [logprob for logprob, _ in self._held_logprobs])
        return events

    def _logprobs_of(self, text: str) -> list[Json]:
        """Those of the tokens that this text is of."""
        told: list[Json] = []
        self._untold_bytes += len(text.encode())
        while self._untold_bytes > 0 and self._held_logprobs:
            logprob, size = self._held_logprobs.popleft()
            self._untold_bytes -= size
            told.append(logprob)
        return told

    def _logprobs(self, delta: Delta) -> list[Json]:
        return [
            {
                **self._token(token_id, item.logprob),
                "top_logprobs": [self._token(top_id, logprob) for top_id, logprob in item.top],
            }
            for token_id, item in zip(delta.token_ids, delta.logprobs, strict=False)
        ]

    def _token(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self._tokenizer.token_text(token_id),
            "logprob": json_logprob(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

    def _item_status(self) -> str:
        return "completed" if self._finish is FinishReason.STOP else "incomplete"

    def _over(self, generation: Generation) -> Json:
        assert self._finish is not None, "an answer that is over says why"
        response = self._response(STATUS_OF[self._finish], output=self._items.output)
        response["usage"] = _usage(generation.usage)
        if self._finish is FinishReason.LENGTH:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response | (timeline_json(generation.overs) if self._options.timeline else {})

    def _response(self, status: str, *, output: list[Json], error: Json | None = None) -> Json:
        return {
            **self._head,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": None,
            "output": output,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **self._options.said,
        }


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
