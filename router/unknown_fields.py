"""Fields that a body's schema does not have: which are let through, and which are refused by name.

OpenAI refuses what it does not know; vLLM lets it through. Here a slip of the pen (``max_token``)
is refused with the nearest name that is known, since an answer that ignores it in silence is not
the one that was asked for. What labels a call, or steers what is not there and changes no token of
an answer, goes through, so that clients of other servers work unchanged.
"""

import difflib
from collections.abc import Collection, Mapping

from pydantic import JsonValue

from pdserve.core.errors import InvalidRequestError

# Any value: labels of a call, and hints to what other servers have.
WITHOUT_EFFECT = frozenset(
    {
        "include_reasoning",  # vLLM's: no model here is parsed for its reasoning
        "kv_transfer_params",  # vLLM's connectors: transfers are the router's business here
        "lora_path",
        "metadata",
        "mm_processor_kwargs",
        "moderation",
        "prompt_cache_key",  # prefixes are found by their content
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",  # vLLM's; here X-Request-Id names a call
        "rid",  # SGLang's
        "safety_identifier",
        "separate_reasoning",
        "session_id",
        "session_params",
        "stream_reasoning",
        "user",
        "verbosity",
    }
)

# Only these values: others ask for what is not there.
WITHOUT_EFFECT_IF: dict[str, tuple[JsonValue, ...]] = {
    "background": (False,),
    "detokenize": (True,),
    "echo": (False,),
    "parallel_tool_calls": (True, False),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
}

MAX_SHOWN_NAME = 60


def check_unknown(fields: Mapping[str, JsonValue], known: Collection[str]) -> None:
    """Raise InvalidRequestError for the first of ``fields`` that is neither ``known`` nor without
    effect. None asks for nothing.
    """
    for name, value in fields.items():
        if value is None or name in known or name in WITHOUT_EFFECT:
            continue
        if name not in WITHOUT_EFFECT_IF:
            raise unknown("", name, nearest(name, known))
        if not is_among(value, WITHOUT_EFFECT_IF[name]):
            allowed = ", ".join(map(repr, WITHOUT_EFFECT_IF[name])) or "nothing"
            raise InvalidRequestError(name, f"this is not supported; allowed: {allowed}")


def is_among(value: JsonValue, values: Collection[JsonValue]) -> bool:
    """Whether JSON's ``value`` is one of ``values``: 0 is not false, and 1.0 is not true."""
    return any(type(value) is type(item) and value == item for item in values)


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that was meant, if ``name`` looks like any."""
    return next(iter(difflib.get_close_matches(name[:MAX_SHOWN_NAME], known, n=1)), None)


def unknown(where: str, name: str, near: str | None) -> InvalidRequestError:
    """The error of a field ``name`` of the object at ``where``; empty: the body itself."""
    path = f"{where}.{_shown(name)}" if where else _shown(name)
    hint = f"; did you mean {near!r}?" if near else ""
    return InvalidRequestError(path, f"it is not known here{hint}")


def _shown(name: str) -> str:
    return name if len(name) <= MAX_SHOWN_NAME else name[:MAX_SHOWN_NAME] + "..."
