"""How many inputs the tests of the marker `fuzz` generate: few, or what `make fuzz` asks for."""

import os

from hypothesis import HealthCheck, settings

FACTOR = int(os.environ.get("PDSERVE_FUZZ_FACTOR", "1"))


def inputs(few: int) -> settings:
    """Settings of a test that generates ``few`` inputs where nobody asks for more."""
    return settings(
        max_examples=few * FACTOR,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
