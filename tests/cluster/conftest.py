"""The cluster that the tests of several files share: one prefill and one decode node over gRPC."""

from collections.abc import Iterator

import pytest

from tests.cluster.served import Served, served

LOCAL_BELOW = 24  # shorter prompts are prefilled on the decode node, the others handed over


@pytest.fixture(scope="session")
def cluster() -> Iterator[Served]:
    with served({"router.local_prefill_below": LOCAL_BELOW}) as cluster:
        yield cluster
