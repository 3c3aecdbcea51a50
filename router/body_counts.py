"""How many entries the lists and objects of a body may have, looked at before any of them is.

Pure. What an entry has to be is the schemas' business; a wrong one in a list of millions must not
cost more than the first wrong one.
"""

from collections.abc import Mapping

from pdserve.core.errors import InvalidRequestError
from router.structured_output import MAX_CHOICES
from router.tool_use import MAX_CALLS, MAX_TOOLS
from router.validation import (
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    wrong_count,
)

MAX_VALUES = 1_100_000  # of a whole body: the most token ids that a call may bring, and some
MAX_CONTAINERS = 100_000  # lists and objects of a whole body
MAX_MESSAGES = 8192
MAX_PARTS = 1024  # of one message's content
MAX_ENTRIES = {
    "chat_template_kwargs": 256,
    "choice": MAX_CHOICES,
    "guided_choice": MAX_CHOICES,
    "include": 16,
    "input": MAX_MESSAGES,
    "logit_bias": MAX_LOGIT_BIAS_ENTRIES,
    "messages": MAX_MESSAGES,
    "metadata": 64,
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "stream_options": 16,
    "tools": MAX_TOOLS,
}
_CONTAINERS = frozenset({list, dict})
MAX_ENTRIES_OF_MESSAGE = {"content": MAX_PARTS, "output": MAX_PARTS, "tool_calls": MAX_CALLS}


def check_counts(body: object) -> int:
    """How many keys the objects of parsed JSON have in all.

    Raises InvalidRequestError naming the field that has too many entries.
    """
    if not isinstance(body, dict):
        return 0  # the schema says what is wanted
    _check_fields(body, "", MAX_ENTRIES)
    for field in ("messages", "input"):
        messages = body.get(field)
        for i, message in enumerate(messages if isinstance(messages, list) else ()):
            if isinstance(message, dict):
                _check_fields(message, f"{field}[{i}].", MAX_ENTRIES_OF_MESSAGE)
    return _check_whole(body)


def _check_fields(values: Mapping[str, object], where: str, most: Mapping[str, int]) -> None:
    for field in values.keys() & most.keys():
        value = values[field]
        if isinstance(value, (list, dict)) and len(value) > most[field]:
            raise wrong_count(f"{where}{field}", len(value), most[field])


def _check_whole(body: dict[str, object]) -> int:
    """The number of keys.

    Stops at the first list or object that is too much, without a look at its entries.
    """
    num_values = num_containers = num_keys = 0
    left: list[tuple[str, object]] = [("body", body)]
    while left:
        field, container = left.pop()
        assert isinstance(container, (list, dict))
        num_values += len(container)
        num_containers += 1
        num_keys += len(container) if isinstance(container, dict) else 0
        if num_values > MAX_VALUES:
            problem = f"the body has more than {MAX_VALUES} values in its lists and objects"
            raise InvalidRequestError(field, problem)
        if num_containers > MAX_CONTAINERS:
            problem = f"the body has more than {MAX_CONTAINERS} lists and objects"
            raise InvalidRequestError(field, problem)
        if container is body:
            left += [(k[:50], v) for k, v in body.items() if isinstance(v, (list, dict))]
        else:
            values = container if isinstance(container, list) else container.values()
            if not _CONTAINERS.isdisjoint(map(type, values)):  # quick: most lists have none
                left += [(field, value) for value in values if isinstance(value, (list, dict))]
    return num_keys
