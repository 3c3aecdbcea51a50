"""``/openapi.json``: the document of all HTTP routes, true to what they take and give.

The routes read their bodies themselves (``http_bodies.py``), so the framework cannot know; here is
said what each takes and answers. A route that is not described here is listed with no more than
that there is something, so that none is missing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fastapi import FastAPI
from fastapi.routing import APIRoute

from router.openapi_answers import Json, answer_schemas, ref
from router.openapi_bodies import body_schemas, query_parameters
from router.service import Service, version

JSON, EVENTS, PLAIN = "application/json", "text/event-stream", "text/plain"
REFUSED = (400, 401, 403, 408, 413, 415, 417, 431)  # what anything with a body may be answered
REASONS = {
    400: "A field is wrong: `param` names it, the message says what is allowed.",
    401: "A key is needed, or this is none.",
    403: "The key is not for this.",
    404: "No such model, or no such path.",
    408: "The body did not come in time, or the request waited too long in its queue.",
    413: "The body is too large.",
    415: "The body is encoded (compressed), which is not known here.",
    417: "The head expects something else than 100-continue.",
    429: "Too much is going on; `Retry-After` says when to come again.",
    431: "The request's head is too large.",
    500: "A fault of the router or of a node.",
    503: "No node is ready, or those that were asked failed.",
    504: "The answer did not end in time.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    answer: str | None  # its schema; None: plain text
    body: str | None = None
    streams: bool = False  # with `stream: true` it answers with events
    errors: tuple[int, ...] = ()
    parameters: tuple[Json, ...] = ()
    is_public: bool = False  # no key is asked for
    is_order: bool = False  # the admin token is asked for always


_BUSY = (404, 429, 500, 503, 504)
_MODEL: Json = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}

OPERATIONS = (
    Operation(
        method="post",
        path="/v1/completions",
        summary="Continue one or several prompts.",
        body="CompletionBody",
        answer="Completion",
        streams=True,
        errors=_BUSY,
    ),
    Operation(
        method="post",
        path="/v1/chat/completions",
        summary="Answer a conversation.",
        body="ChatBody",
        answer="Chat",
        streams=True,
        errors=_BUSY,
    ),
    Operation(
        method="post",
        path="/v1/responses",
        summary="Answer a text or messages, in the form of OpenAI's responses.",
        body="ResponsesBody",
        answer="Response",
        streams=True,
        errors=_BUSY,
    ),
    Operation(
        method="post",
        path="/tokenize",
        summary="Token ids of a text or a conversation.",
        body="TokenizeBody",
        answer="Tokens",
        errors=(404,),
    ),
    Operation(
        method="post",
        path="/detokenize",
        summary="The text of token ids.",
        body="DetokenizeBody",
        answer="Text",
        errors=(404,),
    ),
    Operation(method="get", path="/v1/models", summary="What is served.", answer="Models"),
    Operation(
        method="get",
        path="/v1/models/{model}",
        summary="One model.",
        answer="Model",
        errors=(404,),
        parameters=(_MODEL,),
    ),
    Operation(method="get", path="/health", summary="It runs.", answer="Health", is_public=True),
    Operation(
        method="get",
        path="/ready",
        summary="Whether it serves.",
        answer="Ready",
        is_public=True,
    ),
    Operation(method="get", path="/version", summary="Of pdserve.", answer="Version"),
    Operation(
        method="get", path="/admin/status", summary="Nodes, queues, routes.", answer="Status"
    ),
    Operation(method="get", path="/metrics", summary="For Prometheus.", answer=None),
    Operation(
        method="post",
        path="/admin/drain",
        summary="Send a node nothing new.",
        body="DrainBody",
        answer="Order",
        errors=(500, 503),
        is_order=True,
    ),
    Operation(
        method="post",
        path="/admin/scale",
        summary="Make a pool larger or smaller.",
        body="ScaleBody",
        answer="Order",
        errors=(500, 503),
        is_order=True,
    ),
    Operation(
        method="post",
        path="/admin/role",
        summary="Make a node one of the other pool.",
        body="RoleBody",
        answer="Order",
        errors=(500, 503),
        is_order=True,
    ),
    Operation(
        method="get",
        path="/debug/route",
        summary="Where a prompt of some length would go now.",
        answer="Route",
        errors=(400, 404, 503),
    ),
    Operation(
        method="post",
        path="/debug/route",
        summary="Where a prompt would go now.",
        body="RouteBody",
        answer="Route",
        errors=(404, 503),
    ),
)


def add_openapi_route(app: FastAPI, service: Service) -> None:
    """Last of all: it lists what the app has by then."""
    paths = _paths(app.routes, needs_keys=service.callers.need_keys)
    spec = service.spec
    schemas = body_schemas(spec.config.limits, spec.model.vocab_size, spec.served_name)
    query = query_parameters(schemas)
    paths["/debug/route"]["get"]["parameters"] = query
    document: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "pdserve",
            "version": version(),
            "description": "OpenAI's routes and vLLM's, before prefill and decode pools.",
        },
        "paths": paths,
        "components": {
            "schemas": {**schemas, **answer_schemas()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }

    @app.get("/openapi.json")
    async def openapi() -> Json:
        return document


def _paths(routes: Iterable[object], *, needs_keys: bool) -> dict[str, dict[str, Json]]:
    paths: dict[str, dict[str, Json]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(
            operation, needs_keys=needs_keys
        )
    for path, method in _methods(routes):
        paths.setdefault(path, {}).setdefault(method, _undescribed(path, method))
    return paths


def _methods(routes: Iterable[object]) -> list[tuple[str, str]]:
    return [
        (route.path_format, method.lower())
        for route in routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in sorted(route.methods or ())
    ]


def _described(operation: Operation, *, needs_keys: bool) -> Json:
    described: Json = {
        "summary": operation.summary,
        "operationId": _operation_id(operation.path, operation.method),
        "responses": _answers(operation, needs_keys=needs_keys),
    }
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.body is not None:
        content: Json = {JSON: {"schema": ref(operation.body)}}
        described["requestBody"] = {"required": True, "content": content}
    if operation.is_order or (needs_keys and not operation.is_public):
        described["security"] = [{"key": []}]
    return described


def _answers(operation: Operation, *, needs_keys: bool) -> Mapping[str, Json]:
    content: Json = {PLAIN: {"schema": {"type": "string"}}}
    if operation.answer is not None:
        content = {JSON: {"schema": ref(operation.answer)}}
    if operation.streams:
        content[EVENTS] = {}
    answers: dict[str, Json] = {"200": {"description": "As asked.", "content": content}}
    if operation.path == "/ready":
        answers["503"] = {"description": "It does not serve.", "content": content}
    errors = {*operation.errors, *(REFUSED if operation.body else (408, 431))}
    if needs_keys and not operation.is_public:
        errors |= {401, 403}
    for status in sorted(errors):
        answers[str(status)] = {
            "description": REASONS[status],
            "content": {JSON: {"schema": ref("Error")}},
        }
    return answers


def _undescribed(path: str, method: str) -> Json:
    return {
        "operationId": _operation_id(path, method),
        "responses": {"default": {"description": "Not described here."}},
    }


def _operation_id(path: str, method: str) -> str:
    words = [word for word in path.replace(".", "/").split("/") if word.isidentifier()]
    return "_".join((method, *words)) + ("_of_one" if "{" in path else "")
