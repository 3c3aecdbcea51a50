"""The lists of a body: validated up to their first wrong entry, as else each is an error of its
own, and some of them may be a single text.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError

TEXT_OR_LIST = "text_or_list"  # the type of the error; its message says what is allowed


@dataclass(frozen=True, slots=True)
class FirstFault:
    """As pydantic's ``FailFast``, which has no hash and so cannot stand in a union."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schema = handler(source)
        assert schema["type"] == "list"
        return {**schema, "fail_fast": True}


def text_or_list(value: object, entry: Callable[[str], object], entries: str) -> object:
    """A list as it is; a text as a list of one ``entry``. Raises PydanticCustomError for all else,
    for pydantic to say where.
    """
    if isinstance(value, str):
        return [entry(value)]
    if not isinstance(value, list):
        raise PydanticCustomError(
            TEXT_OR_LIST, "a text or a list of {entries}", {"entries": entries}
        )
    return value
