"""What the HTTP routes answer, as JSON schemas: what is always there; objects may hold more.

The tests send generated requests and hold every answer against these.
"""

Json = dict[str, object]

TEXT: Json = {"type": "string"}
NUMBER: Json = {"type": "number"}
COUNT: Json = {"type": "integer", "minimum": 0}
TRUTH: Json = {"type": "boolean"}
TEXT_OR_NULL: Json = {"type": ["string", "null"]}
ANYTHING: Json = {}


def ref(name: str) -> Json:
    """What refers to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def answer_schemas() -> dict[str, Json]:
    """Every answer's schema, and those that they refer to, by name."""
    return {
        "Error": _object(error=ref("ErrorDetail")),
        "ErrorDetail": _object(
            message=TEXT, type=TEXT, param=TEXT_OR_NULL, code={"type": ["string", "null"]}
        ),
        "Usage": _object(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT),
        "TokenLogprob": _object(token=TEXT, logprob=NUMBER, bytes=_list(COUNT)),
        **_completions(),
        **_chats(),
        **_responses(),
        "Tokens": _object(count=COUNT, max_model_len=COUNT, tokens=_list(COUNT)),
        "Text": _object(prompt=TEXT),
        "Model": _object(id=TEXT, object=_is("model"), created=COUNT, owned_by=TEXT),
        "Models": _object(object=_is("list"), data=_list(ref("Model"))),
        "Health": _object(status=_is("ok")),
        "Ready": _object(status={"enum": ["ready", "degraded", "not ready"]}, reason=TEXT_OR_NULL),
        "Version": _object(version=TEXT),
        "Status": _object(
            model=TEXT,
            version=TEXT,
            state=TEXT,
            reason=TEXT_OR_NULL,
            requests=COUNT,
            nodes=_list(_object(name=TEXT, role=TEXT, ready=TRUTH)),
            routes={"type": "object", "additionalProperties": COUNT},
            queues=_list(ANYTHING),
        ),
        "Order": _object(message=TEXT),
        "Route": _object(
            decode_node=TEXT,
            prefill_nodes=_list(TEXT),
            planned=TEXT,
            rule=TEXT,
            explain=TEXT,
            prompt_tokens=COUNT,
            candidates=_list(ANYTHING),
        ),
    }


def _completions() -> dict[str, Json]:
    logprobs = _object(
        tokens=_list(TEXT),
        token_logprobs=_list({"type": ["number", "null"]}),
        top_logprobs=_list({"type": ["object", "null"]}),
        text_offset=_list(COUNT),
    )
    choice = _object(
        index=COUNT,
        text=TEXT,
        logprobs={"anyOf": [logprobs, {"type": "null"}]},
        finish_reason=TEXT_OR_NULL,
    )
    return {
        "CompletionChoice": choice,
        "Completion": _object(
            id=TEXT,
            object=_is("text_completion"),
            created=COUNT,
            model=TEXT,
            choices=_list(ref("CompletionChoice")),
            usage=ref("Usage"),
        ),
    }


def _chats() -> dict[str, Json]:
    logprobs = _object(content=_list(ref("TokenLogprob")))
    choice = _object(
        index=COUNT,
        message=_object(role=_is("assistant"), content=TEXT_OR_NULL),
        logprobs={"anyOf": [logprobs, {"type": "null"}]},
        finish_reason=TEXT_OR_NULL,
    )
    return {
        "ChatChoice": choice,
        "Chat": _object(
            id=TEXT,
            object=_is("chat.completion"),
            created=COUNT,
            model=TEXT,
            choices=_list(ref("ChatChoice")),
            usage=ref("Usage"),
        ),
    }


def _responses() -> dict[str, Json]:
    part = _object(type=_is("output_text"), text=TEXT, logprobs=_list(ref("TokenLogprob")))
    item = _object(
        id=TEXT, type=_is("message"), role=_is("assistant"), status=TEXT, content=_list(part)
    )
    call = _object(
        id=TEXT,
        type=_is("function_call"),
        call_id=TEXT,
        name=TEXT,
        arguments=TEXT,
        status=TEXT,
    )
    usage = _object(input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT)
    return {
        "ResponseItem": {"anyOf": [item, call]},
        "Response": _object(
            id=TEXT,
            object=_is("response"),
            created_at=COUNT,
            model=TEXT,
            status={"enum": ["completed", "incomplete", "cancelled"]},
            output=_list(ref("ResponseItem")),
            usage=usage,
        ),
    }


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _is(value: str) -> Json:
    return {"const": value}
