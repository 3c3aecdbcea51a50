"""``/debug/route``: where a request would go now and why, with what each way would cost it.

A dry run: nothing is placed, counted or remembered. GET asks for a length, POST also for a prompt
or a conversation, whose beginning may have been sent to some node before.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, JsonValue

from pdserve.core.errors import InvalidRequestError, NeverFitsError
from router.answer_format import Json
from router.http_bodies import check_body, read_body
from router.intake import Conversation
from router.openai_schema import Messages, chat_messages
from router.policies.prediction import Candidate
from router.routing import Ask, Routed
from router.service import Service
from router.validation import check_cache_salt, check_count, check_slo


class RouteBody(BaseModel):
    """What may be asked for; one of the first three."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    prompt_len: int | None = None
    prompt: JsonValue = None
    messages: Messages | None = None
    n: int | None = None
    cache_salt: str | None = None
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    model: str | None = None
    add_special_tokens: bool | None = None


def add_debug_routes(app: FastAPI, service: Service) -> None:
    max_bytes = service.spec.config.limits.max_body_bytes

    @app.get("/debug/route")
    async def route_of_length(request: Request) -> Json:
        body = check_body(RouteBody, _as_json(request.query_params))
        return _told(service.route(await _ask(service, body)))

    @app.post("/debug/route")
    async def route_of_prompt(request: Request) -> Json:
        body = await read_body(request, RouteBody, max_bytes)
        return _told(service.route(await _ask(service, body)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Length:
    field: str
    num_tokens: int
    token_ids: tuple[int, ...] = ()


async def _ask(service: Service, body: RouteBody) -> Ask:
    service.intake.check_model(body.model)
    check_slo("ttft_slo_ms", body.ttft_slo_ms)
    check_slo("tpot_slo_ms", body.tpot_slo_ms)
    check_cache_salt(body.cache_salt)
    check_count("n", body.n, service.spec.config.limits.max_n)
    length = await _length(service, body)
    most = service.max_model_len() - 1  # and one token of output
    if not 1 <= length.num_tokens <= most:
        raise NeverFitsError(length.field, f"got {length.num_tokens} tokens, 1 to {most} fit")
    return Ask(
        num_tokens=length.num_tokens,
        token_ids=length.token_ids,
        num_choices=body.n or 1,
        cache_salt=(body.cache_salt or "").encode(errors="surrogatepass"),
        ttft_slo_ms=body.ttft_slo_ms,
        tpot_slo_ms=body.tpot_slo_ms,
    )


async def _length(service: Service, body: RouteBody) -> _Length:
    given = [body.prompt_len is not None, body.prompt is not None, body.messages is not None]
    if sum(given) != 1:
        raise InvalidRequestError("prompt_len", "give one of prompt_len, prompt and messages")
    if body.prompt_len is not None:
        return _Length(field="prompt_len", num_tokens=body.prompt_len)
    intake = service.intake
    if body.messages is not None:
        conversation = Conversation(
            messages=chat_messages(body.messages),
            add_special_tokens=bool(body.add_special_tokens),
        )
        intake.check_conversation(conversation, service.max_model_len())
        ids = await intake.tokenize_chat(conversation)
        return _Length(field="messages", num_tokens=len(ids), token_ids=ids)
    (prompt,) = await intake.prompts(
        body.prompt, max_prompts=1, max_model_len=service.max_model_len()
    )
    if isinstance(prompt, str):
        special = body.add_special_tokens is not False
        prompt = await intake.tokenize(prompt, add_special_tokens=special)
    return _Length(field="prompt", num_tokens=len(prompt), token_ids=prompt)


def _as_json(query: Mapping[str, str]) -> dict[str, object]:
    """Query values as JSON has them; what is none stays a text, which is refused by its type."""
    values: dict[str, object] = {}
    for field, text in query.items():
        try:
            values[field] = json.loads(text)
        except (ValueError, RecursionError):  # RecursionError: brackets in brackets
            values[field] = text
    return values


def _told(routed: Routed) -> Json:
    decision = routed.decision
    return {
        "decode_node": decision.route.decode_node,
        "prefill_nodes": list(decision.route.prefill_nodes),
        "planned": routed.planned.value,
        "rule": decision.place.value,
        "prompt_class": decision.prompt_class,
        "degraded": decision.degraded,
        "explain": decision.explain,
        "prompt_tokens": routed.prompt.num_tokens,
        "sent_before": dict(routed.prompt.cached),
        "predicted": _candidate(routed.predicted),
        "candidates": [_candidate(way) for way in routed.candidates()],
    }


def _candidate(way: Candidate) -> Json:
    """Times in milliseconds; null: not known, or nobody decodes there."""
    return {
        "decode_node": way.decode.name,
        "prefill_node": way.prefill and way.prefill.name,
        "ttft_ms": _ms(way.ttft_s),
        "tpot_ms": _ms(way.tpot_s),
        "neighbours_ms": _ms(way.neighbours_s),
        "transfer_ms": _ms(way.transfer_s),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
