"""Reading a request's body, and what an error looks like: always OpenAI's error object.

``read_body`` takes bytes to a checked schema object or raises an error that names the field.
"""

import asyncio
import json
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from pdserve.core.errors import (
    InvalidRequestError,
    NeverFitsError,
    OverloadedError,
    PdserveError,
    RequestAbortedError,
    UnauthenticatedError,
    UnknownModelError,
)
from router.body_counts import check_counts
from router.duplicate_keys import check_unique
from router.first_fault import TEXT_OR_LIST
from router.validation import shown

INLINE_BYTES = 64 << 10  # larger bodies are parsed in a thread
MAX_PARSED_AT_ONCE = 2  # of the larger ones: parsed JSON is many times the size of its text
MAX_SHOWN_NAME, MAX_SHOWN_PATH = 50, 200
HTTP_CLIENT_ERRORS = range(400, 500)
ALLOWED = {"model_type": "a JSON object", "dict_type": "a JSON object"}  # by pydantic's error
SIZE_BOUND = "router.limits.max_body_bytes"
BAD_REQUEST, UNSUPPORTED_ENCODING, EXPECTATION_FAILED = 400, 415, 417
CODES: dict[type[PdserveError], str] = {
    NeverFitsError: "context_length_exceeded",
    OverloadedError: "overloaded",
    UnauthenticatedError: "invalid_api_key",
    UnknownModelError: "model_not_found",
}

Body = TypeVar("Body", bound=BaseModel)


async def read_body(
    request: Request, schema: type[Body], max_bytes: int, *, bound: str = SIZE_BOUND
) -> Body:
    """The body as a ``schema``; ``bound`` is the name of what allows no more than ``max_bytes``.

    Raises InvalidRequestError, or HTTPException with status 400, 413, 415 or 417.
    """
    _check_head(request.headers)
    raw = await _read_bytes(request, max_bytes, bound)
    if len(raw) <= INLINE_BYTES:
        return parse_body(schema, raw)
    parsing: asyncio.Semaphore = request.app.state.parsing
    async with parsing:
        return await asyncio.to_thread(parse_body, schema, raw)


def bound_parsing(app: FastAPI) -> None:
    """So many large bodies are parsed at once; the others wait."""
    app.state.parsing = asyncio.Semaphore(MAX_PARSED_AT_ONCE)


def parse_body(schema: type[Body], raw: bytes) -> Body:
    """Counts are looked at first, then types. Raises InvalidRequestError for the first fault."""
    try:
        values = from_json(raw, cache_strings="keys")
    except ValueError as error:
        raise InvalidRequestError("body", f"it is no JSON: {str(error)[:200]}") from None
    check_unique(raw, check_counts(values))
    return check_body(schema, values)


def check_body(schema: type[Body], values: object) -> Body:
    """What was parsed, or came otherwise, as a ``schema``. Raises InvalidRequestError."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise _invalid(error) from None


def error_object(error: PdserveError) -> dict[str, object]:
    """What the client gets, in a body of its own or as the last event of a stream."""
    field = error.field if isinstance(error, (InvalidRequestError, UnknownModelError)) else None
    return _error_object(str(error), kind=error.kind, param=field, code=CODES.get(type(error)))


def error_response(error: PdserveError) -> JSONResponse:
    headers = {}
    if isinstance(error, UnauthenticatedError):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    return JSONResponse(error_object(error), error.http_status, headers)


def add_error_handlers(app: FastAPI) -> None:
    """Every error leaves as OpenAI's error object: ours, the framework's, and faults."""

    @app.exception_handler(PdserveError)
    async def on_pdserve_error(request: Request, error: PdserveError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def on_http_exception(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        client_fault = error.status_code in HTTP_CLIENT_ERRORS
        kind = "invalid_request_error" if client_fault else "internal_error"
        return JSONResponse(
            _error_object(message, kind=kind, param=None, code=None),
            error.status_code,
            error.headers,
        )

    @app.exception_handler(ClientDisconnect)
    async def on_client_left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=RequestAbortedError.http_status)  # nobody reads it

    @app.exception_handler(Exception)
    async def on_fault(request: Request, error: Exception) -> JSONResponse:
        # The traceback is logged by the server, which gets the error after this answer.
        message = "fault of the router; see its log"
        return JSONResponse(
            _error_object(message, kind="internal_error", param=None, code=None), 500
        )


def _check_head(headers: Headers) -> None:
    """Refuse by name what is asked of a body before it comes, where it cannot be done."""
    for coding in _listed(headers, "content-encoding"):
        if coding.lower() != "identity":
            raise HTTPException(
                UNSUPPORTED_ENCODING,
                f"Content-Encoding: got {shown(coding)}, only identity is allowed: send the body "
                "as it is",
                {"Accept-Encoding": "identity"},
            )
    for coding in _listed(headers, "transfer-encoding"):
        if coding.lower() != "chunked":
            problem = f"Transfer-Encoding: got {shown(coding)}, only chunked is known"
            raise HTTPException(BAD_REQUEST, problem)
    for wish in _listed(headers, "expect"):
        if wish.lower() != "100-continue":
            problem = f"Expect: got {shown(wish)}, only 100-continue is known"
            raise HTTPException(EXPECTATION_FAILED, problem)


def _listed(headers: Headers, name: str) -> list[str]:
    """The members of a header that is a list."""
    members = ",".join(headers.getlist(name)).split(",")
    return [member.strip() for member in members if member.strip()]


async def _read_bytes(request: Request, max_bytes: int, bound: str) -> bytes:
    problem = f"the body is larger than {max_bytes} bytes, the most that {bound} allows"
    too_large = HTTPException(413, problem)
    if int(request.headers.get("content-length", 0)) > max_bytes:  # the server checked the number
        raise too_large
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


def _invalid(error: ValidationError) -> InvalidRequestError:
    # Lists end at their first wrong entry (FailFast), so there are few.
    first = error.errors(include_url=False, include_context=False)[0]
    kind, problem = first["type"], first["msg"][:200]
    if kind in ALLOWED or kind == TEXT_OR_LIST:
        problem = f"got {shown(first['input'])}, allowed is {ALLOWED.get(kind, problem)}"
    elif kind != "missing":
        problem = f"got {shown(first['input'])}: {problem}"
    return InvalidRequestError(_path(first["loc"]) or "body", problem)


def _path(location: tuple[int | str, ...]) -> str:
    """('messages', 0, 'role') → 'messages[0].role'."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            plain = part.isidentifier() and len(part) <= MAX_SHOWN_NAME
            name = part if plain else json.dumps(part[:MAX_SHOWN_NAME])
            path += f".{name}" if path else name
    return path[:MAX_SHOWN_PATH]


def _error_object(
    message: str, *, kind: str, param: str | None, code: str | None
) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
