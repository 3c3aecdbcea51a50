"""/v1/responses: OpenAI's newer form of a chat; nothing is kept for later calls."""

import time
import uuid

from fastapi import FastAPI, Request
from fastapi.responses import Response

from router.http_bodies import read_body
from router.http_generation import answer, timeline_wanted
from router.openai_responses import ResponsesFormat, ResponsesOptions
from router.responses_schema import ResponsesBody
from router.service import Service
from router.validation import SamplingFields


def add_responses_route(app: FastAPI, service: Service) -> None:
    limits = service.spec.config.limits

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        body = await read_body(request, ResponsesBody, limits.max_body_bytes)
        body.check_supported()
        service.intake.check_model(body.model)
        fields = body.sampling_fields(limits.max_grammar_bytes)
        generation_request = await service.intake.chat(
            body.conversation(),
            fields,
            max_model_len=service.max_model_len(),
            priority=body.priority,
        )
        answer_format = ResponsesFormat(
            unique=uuid.uuid4().hex,
            model=service.spec.served_name,
            created_s=int(time.time()),
            tokenizer=service.tokenizer,
            request=generation_request,
            options=ResponsesOptions(
                streamed=bool(body.stream),
                timeline=timeline_wanted(request, body.timeline),
                said=_said(body, fields),
            ),
        )
        return answer(service, request, [generation_request], answer_format)


def _said(body: ResponsesBody, fields: SamplingFields) -> dict[str, object]:
    """What the answer repeats of the question, with defaults in place."""
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": fields.logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "user": body.user,
    }
