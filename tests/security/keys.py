"""Two tenants, an operator and a stranger."""

from pdserve.core.api_keys import hashed, line_of, new_key

ALICE, BOB, OPERATOR, STRANGER = (new_key() for _ in range(4))
KEYS = (
    hashed(ALICE, tenant="alice"),
    hashed(BOB, tenant="bob"),
    hashed(OPERATOR, tenant="grafana", is_operator=True),
)
FILE = "# who may call\n" + "\n".join(map(line_of, KEYS)) + "\n"
TOKEN = "the-admin-token"


def bearer(key: str) -> dict[str, str]:
    """The header, or gRPC's metadata, with a key."""
    return {"authorization": f"Bearer {key}"}


def metadata(key: str) -> tuple[tuple[str, str], ...]:
    return tuple(bearer(key).items())
