"""How clients keep their connections to the public gRPC API.

Sessions between nodes have heartbeats of their own (``session.py``). A client may be behind a proxy
that forgets connections which say nothing, so it asks whether the router is still there, less often
than the router allows (``router/grpc_limits.py``).
"""

from pdserve.rpc.session import CHANNEL_OPTIONS

CLIENT_PING_MS = 30_000
CLIENT_PING_TIMEOUT_MS = 20_000

CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    *CHANNEL_OPTIONS,
    ("grpc.keepalive_time_ms", CLIENT_PING_MS),
    ("grpc.keepalive_timeout_ms", CLIENT_PING_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),  # no bound
)
