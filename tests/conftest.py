"""Fixtures that more than one folder of tests uses."""

from pathlib import Path

import pytest
from hypothesis import settings

from pdserve.models.fetch import fetch

# Machines are busy: no example fails for the time that it takes.
settings.register_profile("pdserve", deadline=None)
settings.load_profile("pdserve")

SMALL_MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The real small model's directory; tests that use it carry the marker `model`."""
    return fetch(SMALL_MODEL, progress=False)
