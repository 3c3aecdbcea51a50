"""The HTTP routes. What OpenAI's clients and vLLM's users know has their names and shapes.

Each generating route reads a body, has it checked, and hands over to ``GenerationResponse``.
"""

import time
import uuid

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from pdserve.core.errors import InvalidRequestError
from router.admin_http import add_admin_routes
from router.answer_format import Json
from router.debug_route import add_debug_routes
from router.http_access import RequireKey
from router.http_bodies import add_error_handlers, bound_parsing, read_body
from router.http_generation import answer, timeline_wanted
from router.http_head import HeadAsGet
from router.http_labels import RequestLabels
from router.http_turns import OneAtATime
from router.intake import Conversation
from router.live_page import add_live_routes
from router.metrics_http import add_metrics_routes
from router.openai_chat import ChatFormat, ChatOptions
from router.openai_completions import CompletionFormat, CompletionOptions
from router.openai_schema import (
    COMPLETION_MAX_TOKENS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    chat_messages,
)
from router.openapi import add_openapi_route
from router.responses_http import add_responses_route
from router.service import Service, version


def make_app(service: Service) -> FastAPI:
    """The application that the HTTP server runs."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_middleware(HeadAsGet)
    app.add_middleware(RequireKey, callers=service.callers, admin_token=service.spec.admin_token)
    app.add_middleware(RequestLabels)  # a refused call has its label too
    app.add_middleware(OneAtATime, clock=service.clock)  # outermost: the rest is work
    add_error_handlers(app)
    bound_parsing(app)
    _add_generating_routes(app, service)
    add_responses_route(app, service)
    _add_text_routes(app, service)
    _add_model_routes(app, service)
    _add_operator_routes(app, service)
    add_admin_routes(app, service)
    add_debug_routes(app, service)
    add_metrics_routes(app, service)
    add_live_routes(app, service)
    add_openapi_route(app, service)
    return app


def _add_generating_routes(app: FastAPI, service: Service) -> None:
    limits = service.spec.config.limits

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionBody, limits.max_body_bytes)
        body.check_supported()
        service.intake.check_model(body.model)
        requests = await service.intake.completion(
            body.prompt,
            body.sampling_fields(limits.max_grammar_bytes),
            add_special_tokens=body.add_special_tokens is not False,
            default_max_tokens=COMPLETION_MAX_TOKENS,
            max_model_len=service.max_model_len(),
            priority=body.priority,
        )
        answer_format = CompletionFormat(
            answer_id=f"cmpl-{uuid.uuid4().hex}",
            model=service.spec.served_name,
            created_s=int(time.time()),
            tokenizer=service.tokenizer,
            requests=requests,
            options=CompletionOptions(
                streamed=bool(body.stream),
                include_usage=body.include_usage,
                timeline=timeline_wanted(request, body.timeline),
                token_ids=bool(body.return_token_ids),
                echo=bool(body.echo),
                prompt_logprobs=body.prompt_logprobs,
                num_logprobs=body.logprobs,
            ),
        )
        return answer(service, request, requests, answer_format)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, ChatBody, limits.max_body_bytes)
        body.check_supported()
        service.intake.check_model(body.model)
        generation_request = await service.intake.chat(
            body.conversation(),
            body.sampling_fields(limits.max_grammar_bytes),
            max_model_len=service.max_model_len(),
            priority=body.priority,
        )
        answer_format = ChatFormat(
            answer_id=f"chatcmpl-{uuid.uuid4().hex}",
            model=service.spec.served_name,
            created_s=int(time.time()),
            tokenizer=service.tokenizer,
            request=generation_request,
            options=ChatOptions(
                streamed=bool(body.stream),
                include_usage=body.include_usage,
                timeline=timeline_wanted(request, body.timeline),
                token_ids=bool(body.return_token_ids),
                prompt_logprobs=body.prompt_logprobs,
            ),
        )
        return answer(service, request, [generation_request], answer_format)


def _add_text_routes(app: FastAPI, service: Service) -> None:
    max_bytes = service.spec.config.limits.max_body_bytes

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Json:
        body = await read_body(request, TokenizeBody, max_bytes)
        service.intake.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("prompt", "give either prompt or messages")
        if body.prompt is not None:
            service.intake.check_text("prompt", body.prompt, service.max_model_len())
            ids = await service.intake.tokenize(
                body.prompt, add_special_tokens=body.add_special_tokens is not False
            )
        else:
            conversation = Conversation(
                messages=chat_messages(body.messages or []),
                add_special_tokens=bool(body.add_special_tokens),
                add_generation_prompt=body.add_generation_prompt is not False,
            )
            service.intake.check_conversation(conversation, service.max_model_len())
            ids = await service.intake.tokenize_chat(conversation)
        texts = [service.tokenizer.token_text(i) for i in ids] if body.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": service.max_model_len(),
            "tokens": list(ids),
            "token_strs": texts,
        }

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Json:
        body = await read_body(request, DetokenizeBody, max_bytes)
        service.intake.check_model(body.model)
        return {"prompt": await service.intake.detokenize(body.tokens)}


def _add_model_routes(app: FastAPI, service: Service) -> None:
    def model_card() -> Json:
        return {
            "id": service.spec.served_name,
            "object": "model",
            "created": service.created_s,
            "owned_by": "pdserve",
            "root": service.spec.served_name,
            "parent": None,
            "max_model_len": service.max_model_len(),
        }

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [model_card()]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Json:
        service.intake.check_model(model)
        return model_card()


def _add_operator_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Json:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        state = service.readiness()
        reason = None if service.callers.need_keys else state.reason  # it names nodes
        body = {"status": state.word, "reason": reason}
        return JSONResponse(body, 200 if state.ready else 503)

    @app.get("/version")
    async def show_version() -> Json:
        return {"version": version()}

    @app.get("/admin/status")
    async def status() -> Json:
        return service.status()
