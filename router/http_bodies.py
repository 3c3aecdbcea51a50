"""Reading a request's body, and what an error looks like: always OpenAI's error object.

``read_body`` takes bytes to a checked schema object or raises an error that names the field.
"""

import json
from collections.abc import Mapping
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError
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

HTTP_CLIENT_ERRORS = range(400, 500)
CODES: dict[type[PdserveError], str] = {
    NeverFitsError: "context_length_exceeded",
    OverloadedError: "overloaded",
    UnauthenticatedError: "invalid_api_key",
    UnknownModelError: "model_not_found",
}

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, schema: type[Body], max_bytes: int) -> Body:
    """The body as a ``schema``. Raises InvalidRequestError, or HTTPException 413."""
    raw = await _read_bytes(request, max_bytes)
    try:
        return schema.model_validate_json(raw)
    except ValidationError as error:
        raise _invalid(error) from None


def check_body(schema: type[Body], values: Mapping[str, object]) -> Body:
    """What came otherwise than in a body, as a ``schema``. Raises InvalidRequestError."""
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


async def _read_bytes(request: Request, max_bytes: int) -> bytes:
    too_large = HTTPException(413, f"the body is larger than {max_bytes} bytes")
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
    details = error.errors(include_url=False, include_context=False, include_input=False)
    first = details[0]
    location = first["loc"]
    if not location:
        return InvalidRequestError("body", first["msg"])
    return InvalidRequestError(_path(location), first["msg"])


def _path(location: tuple[int | str, ...]) -> str:
    """('messages', 0, 'role') → 'messages[0].role'."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            name = part if part.isidentifier() else json.dumps(part)[:50]
            path += f".{name}" if path else name
    return path


def _error_object(
    message: str, *, kind: str, param: str | None, code: str | None
) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
