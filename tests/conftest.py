"""Fixtures that more than one folder of tests uses."""

from pathlib import Path

import pytest

from pdserve.models.fetch import fetch

SMALL_MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The real small model's directory; tests that use it carry the marker `model`."""
    return fetch(SMALL_MODEL, progress=False)
