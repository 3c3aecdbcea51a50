"""What the benchmarks call a server with: ``$PDSERVE_API_KEY``, where it is set."""

from pdserve.core.environment import api_key


def headers() -> dict[str, str]:
    """Of each call."""
    key = api_key()
    return {} if key is None else {"Authorization": f"Bearer {key}"}
