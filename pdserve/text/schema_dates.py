"""Dates in JSON schemas as patterns: days that the calendar has, in the years 0001 to 9999.

The grammar library reads ``"format": "date"`` as RFC 3339 spells it, which lets 29 February come in
any year and has a year 0; validators, and the programs behind them, know neither.
"""

import json
from typing import Any

from pdserve.text.schema_walk import schemas_in

_LEAP = "(0[48]|[2468][048]|[13579][26])"  # two digits that divide by four, 00 left out
_LEAP_YEAR = f"([0-9]{{2}}{_LEAP}|{_LEAP}00)"
_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DAY_OF_YEAR = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    "|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
DATE = f"({_YEAR}-{_DAY_OF_YEAR}|{_LEAP_YEAR}-02-29)"
TIME = (
    "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_PATTERNS = {"date": f"^{DATE}$", "date-time": f"^{DATE}T{TIME}$"}

# Keywords that bound a string in another way, which no second pattern may join.
_BOUNDS = frozenset({"maxLength", "minLength", "pattern"})


def with_real_dates(schema: Any) -> Any:  # noqa: ANN401 - a schema may be any JSON value
    """The schema with its date formats as patterns; what else bounds such a string stays as it is.

    For schemas that ``check_depth`` lets through.
    """
    changed = json.loads(json.dumps(schema))
    for each in schemas_in(changed):
        kind = each.get("format")
        if isinstance(kind, str) and kind in _PATTERNS and not _BOUNDS & each.keys():
            del each["format"]
            each["pattern"] = _PATTERNS[kind]
    return changed
