"""Tool calls of one gRPC answer: each delta's text becomes text and calls, choice by choice."""

from collections.abc import Iterator

from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.text.tokenizer import Tokenizer
from pdserve.text.tool_parser import CallArguments, CallBegun, TextPiece
from router.chat_calls import ChoiceCalls
from router.choice_text import Delta
from router.generation import GenerationRequest
from router.grpc_messages import delta_message, prompt_messages


class GrpcAnswer:
    """The messages of one call."""

    def __init__(self, request: GenerationRequest, request_id: str, tokenizer: Tokenizer) -> None:
        self._request_id = request_id
        self._prompt_ids = request.job.prompt_ids
        self._tokenizer = tokenizer
        self._has_told_prompt = False
        self._calls = {
            choice: ChoiceCalls(request.calls)
            for choice in range(request.num_given)
            if request.calls is not None
        }

    def messages(self, delta: Delta) -> Iterator[pb.GenerateResponse]:
        """What one delta is on the wire; before the first tokens of all, those of the prompt."""
        if delta.prompt_logprobs is not None and not self._has_told_prompt:
            self._has_told_prompt = True
            yield from prompt_messages(
                self._request_id, self._prompt_ids, delta.prompt_logprobs, self._tokenizer
            )
        yield self._message(delta)

    def _message(self, delta: Delta) -> pb.GenerateResponse:
        message = delta_message(self._request_id, delta, self._tokenizer)
        if (calls := self._calls.get(delta.choice)) is None:
            return message
        message.text = ""
        for event in calls.events(delta.text, is_last=delta.finish_reason is not None):
            match event:
                case TextPiece(text=text):
                    message.text += text
                case CallBegun(index=index, name=name):
                    message.tool_calls.add(index=index, id=calls.new_id(), name=name)
                case CallArguments(index=index, json=json):
                    _add_arguments(message, index, json)
        message.finish_reason = calls.finish_reason(delta.finish_reason) or ""
        return message


def _add_arguments(message: pb.GenerateResponse, index: int, json: str) -> None:
    """To the message's delta of that call, if it has one."""
    if message.tool_calls and message.tool_calls[-1].index == index:
        message.tool_calls[-1].arguments += json
    else:
        message.tool_calls.add(index=index, arguments=json)
