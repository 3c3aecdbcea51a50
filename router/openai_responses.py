"""The answers of /v1/responses in OpenAI's form: one object, or a stream of named events.

One message of one text part. The events of a stream are numbered, and each names its type twice, as
OpenAI's do; the stream has no [DONE].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic_core import to_json

from pdserve.core.errors import PdserveError
from pdserve.core.request import FinishReason
from pdserve.text.tokenizer import Tokenizer
from router.answer_format import Json, json_logprob, timeline_json
from router.generation import Delta, Generation, Usage

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
        options: ResponsesOptions,
    ) -> None:
        self._item_id = f"msg_{unique}"
        self._head: Json = {
            "id": f"resp_{unique}",
            "object": "response",
            "created_at": created_s,
            "model": model,
        }
        self._tokenizer = tokenizer
        self._options = options
        self._num_events = 0
        self._text: list[str] = []
        self._logprobs: list[Json] = []
        self._finish: FinishReason | None = None

    @property
    def streamed(self) -> bool:
        return self._options.streamed

    def whole(self, answers: Sequence[Delta], generation: Generation) -> Json:
        self._take(answers[0])
        return self._over(generation)

    def events(self, delta: Delta) -> bytes:
        begun = b"" if self._num_events else self._begin()
        logprobs = self._take(delta)
        if not delta.text and not logprobs:
            return begun
        return begun + self._event(
            "response.output_text.delta",
            {**self._part_place(), "delta": delta.text, "logprobs": logprobs},
        )

    def ending(self, generation: Generation) -> bytes:
        place, text = self._part_place(), "".join(self._text)
        done = {**place, "text": text, "logprobs": self._logprobs}
        item = {"output_index": 0, "item": self._item()}
        over = self._over(generation)
        last = "incomplete" if over["status"] == "incomplete" else "completed"
        return b"".join(
            (
                self._event("response.output_text.done", done),
                self._event("response.content_part.done", {**place, "part": self._part()}),
                self._event("response.output_item.done", item),
                self._event(f"response.{last}", {"response": over}),
            )
        )

    def failure(self, error: PdserveError) -> bytes:
        failed: Json = {"code": "server_error", "message": str(error)}
        response = self._response("failed", output=[self._item()], error=failed)
        return self._event("response.failed", {"response": response})

    def _begin(self) -> bytes:
        response = self._response("in_progress", output=[])
        item: Json = {**self._message("in_progress"), "content": []}
        return b"".join(
            (
                self._event("response.created", {"response": response}),
                self._event("response.in_progress", {"response": response}),
                self._event("response.output_item.added", {"output_index": 0, "item": item}),
                self._event(
                    "response.content_part.added", {**self._part_place(), "part": _text_part("")}
                ),
            )
        )

    def _event(self, name: str, content: Json) -> bytes:
        data = to_json({"type": name, "sequence_number": self._num_events, **content})
        self._num_events += 1
        return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"

    def _take(self, delta: Delta) -> list[Json]:
        """Keep what an answer's whole text is made of; returns the log-probabilities."""
        logprobs = [
            {
                **self._token(token_id, item.logprob),
                "top_logprobs": [self._token(top_id, logprob) for top_id, logprob in item.top],
            }
            for token_id, item in zip(delta.token_ids, delta.logprobs, strict=False)
        ]
        self._text.append(delta.text)
        self._logprobs += logprobs
        self._finish = delta.finish_reason
        return logprobs

    def _token(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self._tokenizer.token_text(token_id),
            "logprob": json_logprob(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

    def _part_place(self) -> Json:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _message(self, status: str) -> Json:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status}

    def _part(self) -> Json:
        return _text_part("".join(self._text)) | {"logprobs": self._logprobs}

    def _item(self) -> Json:
        status = "completed" if self._finish is FinishReason.STOP else "incomplete"
        return {**self._message(status), "content": [self._part()]}

    def _over(self, generation: Generation) -> Json:
        assert self._finish is not None, "an answer that is over says why"
        response = self._response(STATUS_OF[self._finish], output=[self._item()])
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
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "usage": None,
            **self._options.said,
        }


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
