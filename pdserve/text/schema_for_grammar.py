"""A client's JSON schema as the grammar library is given it: what the library takes for something
else is put right or refused.
"""

from typing import Any

from pdserve.core.errors import InvalidRequestError
from pdserve.text.nesting import check_depth
from pdserve.text.schema_dates import with_real_dates
from pdserve.text.schema_numbers import check_numbers


def schema_for_grammar(field: str, schema: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Raises InvalidRequestError naming the field for a schema that no answer could keep to."""
    check_depth(field, schema)
    try:
        check_numbers(schema)
    except ValueError as error:
        raise InvalidRequestError(field, str(error)) from None
    return with_real_dates(schema)
