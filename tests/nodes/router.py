"""What a router hears from a decode node, held against what is right."""

from pdserve.core.request import FinishReason, RequestKey
from pdserve.rpc import convert
from pdserve.rpc.v1 import session_pb2
from tests.nodes.specs import MODEL, Asked
from tests.oracle import logprobs_of, prompt_logprob_of


class Hearing:
    """All requests of one router. Asserts that nothing comes twice, wrongly or after the end."""

    def __init__(self) -> None:
        self.asked: dict[RequestKey, Asked] = {}

    def add(self, asked: Asked) -> None:
        self.asked[asked.request.key] = asked

    def hear(self, outputs: session_pb2.StepOutputs) -> None:
        """One message of a decode node."""
        for part in outputs.prompt_outputs:
            self._on_prompt(part)
        for output in outputs.outputs:
            self._on_output(output)
        for failure in outputs.failures:
            asked = self._asked(failure)
            asked.failure = failure.kind
            asked.retryable = failure.retryable
            asked.failure_message = failure.message
            assert failure.message
        for item in outputs.timelines:
            asked = self.asked[RequestKey(item.request_id, item.attempt)]
            assert not asked.unwanted
            asked.timelines.append(convert.timeline_from_proto(item.timeline))

    def _asked(
        self, item: session_pb2.TokenOutput | session_pb2.PromptOutput | session_pb2.RequestFailure
    ) -> Asked:
        asked = self.asked[RequestKey(item.request_id, item.attempt)]
        assert not asked.unwanted, "something came for a request that was aborted"
        assert not asked.is_ended, "something came after the end"
        return asked

    def _on_prompt(self, message: session_pb2.PromptOutput) -> None:
        """A prompt that is computed again may be told again, but no part of it is left out."""
        asked = self._asked(message)
        request, output = asked.request, convert.prompt_output_from_proto(message)
        assert request.sampling.prompt_logprobs is not None, "nobody asked for these"
        assert not any(asked.got.values()), "they come before the first token"
        assert 1 <= output.index <= asked.num_scored, "a part of the prompt was left out"
        stop = output.index + len(output.logprobs)
        tokens = request.token_ids[output.index : stop]
        assert stop <= request.prompt_len
        assert output.logprobs == tuple(
            prompt_logprob_of(token, request.sampling) for token in tokens
        )
        asked.num_scored = max(asked.num_scored, stop)

    def _on_output(self, message: session_pb2.TokenOutput) -> None:
        asked = self._asked(message)
        output = convert.output_from_proto(message)
        got, expected = asked.got[output.choice], asked.expected[output.choice]
        assert output.choice not in asked.ended, "a token after the last one"
        if asked.request.sampling.prompt_logprobs is not None:
            assert asked.num_scored == asked.request.prompt_len, "some of the prompt is missing"
        assert output.index == len(got), "a token twice, or one is missing"
        assert list(output.token_ids) == expected[len(got) : len(got) + 1], "a wrong token"
        (token,) = output.token_ids
        assert output.logprobs == logprobs_of(token, asked.request.sampling)
        got += output.token_ids
        assert (output.finish_reason is not None) == (len(got) == len(expected))
        if output.finish_reason is not None:
            asked.ended[output.choice] = output.finish_reason
            ends = (*MODEL.eos_token_ids, *asked.request.sampling.stop_token_ids)
            is_end = got[-1] in ends
            assert output.finish_reason is (FinishReason.STOP if is_end else FinishReason.LENGTH)
            assert output.stop_token_id == (got[-1] if is_end else None)
