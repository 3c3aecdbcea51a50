"""The answers of /v1/completions in OpenAI's form, with vLLM's token ids where asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.core.errors import PdserveError
from pdserve.core.request import PromptLogprob, TokenLogprobs
from pdserve.text.tokenizer import Tokenizer
from router.answer_format import (
    Json,
    TextEvents,
    ending_bytes,
    event_bytes,
    failure_bytes,
    json_logprob,
    prompt_logprobs_json,
    timeline_json,
    usage_json,
)
from router.choice_text import Delta
from router.generation import Generation, GenerationRequest
from router.text_offsets import TextOffsets, prompt_offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOptions:
    """What the client asked for, beyond tokens."""

    streamed: bool
    include_usage: bool
    timeline: bool
    token_ids: bool
    echo: bool
    num_logprobs: int | None  # the likeliest tokens of each; None: no log-probabilities
    prompt_logprobs: int | None  # likewise, of the prompt's tokens


class CompletionFormat:
    """Choice ``c`` of prompt ``p`` has the index ``p * n + c``."""

    def __init__(
        self,
        *,
        answer_id: str,
        model: str,
        created_s: int,
        tokenizer: Tokenizer,
        requests: Sequence[GenerationRequest],
        options: CompletionOptions,
    ) -> None:
        self._head: Json = {
            "id": answer_id,
            "object": "text_completion",
            "created": created_s,
            "model": model,
        }
        self._tokenizer = tokenizer
        self._requests = requests
        self._options = options
        self._begun: set[int] = set()  # indices of choices
        self._offsets: dict[int, TextOffsets] = {}  # of choices, where log-probabilities are shown
        self._prompt_logprobs: dict[int, list[Json | None] | None] = {}  # of prompts, as shown
        self._text_events: dict[int, TextEvents] = {}

    @property
    def streamed(self) -> bool:
        return self._options.streamed

    def whole(self, answers: Sequence[Delta], generation: Generation) -> Json:
        choices = [self._choice(delta) for delta in answers]
        body = {**self._head, "choices": choices, "usage": usage_json(generation.usage)}
        return body | (timeline_json(generation.overs) if self._options.timeline else {})

    def events(self, delta: Delta) -> bytes:
        index = self._index(delta)
        text_only = delta.finish_reason is None and not delta.logprobs
        if index not in self._begun or not text_only or self._options.token_ids:
            return event_bytes(self._event([self._choice(delta)]))
        if not delta.text:
            return b""  # nothing to show yet
        if index not in self._text_events:
            self._text_events[index] = TextEvents(
                lambda text: self._event([self._choice(replace(delta, text=text))])
            )
        return self._text_events[index].bytes_of(delta.text)

    def ending(self, generation: Generation) -> bytes:
        return ending_bytes(self._last_event(generation))

    def failure(self, error: PdserveError) -> bytes:
        return failure_bytes(error)

    def _last_event(self, generation: Generation) -> Json | None:
        extra = timeline_json(generation.overs) if self._options.timeline else {}
        if self._options.include_usage:
            extra["usage"] = usage_json(generation.usage)
        return {**self._event([]), **extra} if extra else None

    def _event(self, choices: list[Json]) -> Json:
        usage: Json = {"usage": None} if self._options.include_usage else {}
        return {**self._head, "choices": choices, **usage}

    def _choice(self, delta: Delta) -> Json:
        index = self._index(delta)
        first = index not in self._begun
        self._begun.add(index)
        choice: Json = {
            "index": index,
            "text": self._echo(delta.prompt) + delta.text if first else delta.text,
            "logprobs": self._logprobs(index, delta) if delta.logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._options.token_ids:
            choice["token_ids"] = list(delta.token_ids)
            prompt_ids = self._prompt_ids(delta.prompt)
            choice["prompt_token_ids"] = list(prompt_ids) if first else None
        if first and (num_top := self._options.prompt_logprobs) is not None:
            choice["prompt_logprobs"] = self._shown_prompt_logprobs(delta, num_top)
        return choice

    def _index(self, delta: Delta) -> int:
        return delta.prompt * self._requests[delta.prompt].num_given + delta.choice

    def _prompt_ids(self, prompt: int) -> tuple[int, ...]:
        return self._requests[prompt].job.prompt_ids

    def _echo(self, prompt: int) -> str:
        """What the text of its choices begins with."""
        if not self._options.echo:
            return ""
        return self._tokenizer.decode(self._prompt_ids(prompt), skip_special_tokens=True)

    def _shown_prompt_logprobs(self, delta: Delta, num_top: int) -> list[Json | None] | None:
        """The same for all choices of a prompt."""
        prompt_ids = self._prompt_ids(delta.prompt)
        if self._prompt_logprobs.get(delta.prompt) is None:
            self._prompt_logprobs[delta.prompt] = prompt_logprobs_json(
                delta, prompt_ids, num_top, self._tokenizer
            )
        return self._prompt_logprobs[delta.prompt]

    def _logprobs(self, index: int, delta: Delta) -> Json:
        """Of the new tokens and, before the first ones, of an echoed prompt's."""
        token_ids, offsets = delta.token_ids, self._next_offsets(index, delta)
        items: tuple[TokenLogprobs | PromptLogprob | None, ...] = delta.logprobs
        if self._options.echo and delta.prompt_logprobs is not None:
            prompt_ids = self._prompt_ids(delta.prompt)
            token_ids, items = prompt_ids + token_ids, (None, *delta.prompt_logprobs, *items)
            offsets = prompt_offsets(self._tokenizer, prompt_ids) + offsets
        tokens = [self._tokenizer.token_text(token_id) for token_id in token_ids]
        return {
            "tokens": tokens,
            "token_logprobs": [item and json_logprob(item.logprob) for item in items],
            "top_logprobs": [
                item and self._top(token, item) for token, item in zip(tokens, items, strict=True)
            ],
            "text_offset": offsets,
        }

    def _next_offsets(self, index: int, delta: Delta) -> list[int]:
        if index not in self._offsets:
            self._offsets[index] = TextOffsets(
                self._tokenizer,
                prompt_ids=self._prompt_ids(delta.prompt),
                start=len(self._echo(delta.prompt)),
                skip_special_tokens=self._requests[delta.prompt].rules.skip_special_tokens,
            )
        return self._offsets[index].of(delta.token_ids)

    def _top(self, token: str, item: TokenLogprobs | PromptLogprob) -> Json:
        """Texts of the likeliest tokens and of the sampled one; of equal texts the better one."""
        top: Json = {}
        for token_id, logprob in item.top[: self._options.num_logprobs]:
            top.setdefault(self._tokenizer.token_text(token_id), json_logprob(logprob))
        top.setdefault(token, json_logprob(item.logprob))
        return top
