"""Where a pdserve router had prompts prefilled, by its own count. Other servers tell nothing.

So nobody takes figures without a single handoff for those of a disaggregated cluster.
"""

import ssl

import httpx

from pdserve.bench.authorization import headers

LOOKUP_TIMEOUT_S = 10.0

Routes = dict[str, int]


def routes_taken(url: str, verify: ssl.SSLContext | bool = True) -> Routes | None:
    """Prompts so far by route: disaggregated, local, fallback; None where that is not told."""
    try:
        reply = httpx.get(
            f"{url}/admin/status",
            headers=headers(),
            timeout=LOOKUP_TIMEOUT_S,
            trust_env=False,
            verify=verify,
        )
        told = reply.raise_for_status().json()["routes"]
        return {str(route): int(count) for route, count in told.items()}
    except (httpx.HTTPError, ValueError, LookupError, AttributeError, TypeError):
        return None


def routes_since(before: Routes | None, after: Routes | None) -> Routes | None:
    """What was taken between two looks."""
    if before is None or after is None:
        return None
    return {route: count - before.get(route, 0) for route, count in after.items()}
