"""Lists that are validated up to their first wrong entry; else each is an error of its own."""

from dataclasses import dataclass

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema


@dataclass(frozen=True, slots=True)
class FirstFault:
    """As pydantic's ``FailFast``, which has no hash and so cannot stand in a union."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schema = handler(source)
        assert schema["type"] == "list"
        return {**schema, "fail_fast": True}
