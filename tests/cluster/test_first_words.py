"""The command that `pdserve serve` shows, as a user pastes it."""

import pytest

from pdserve.cluster.serving import curl_lines
from pdserve.core.security_config import SecurityConfig

PLAIN = SecurityConfig()
TLS = SecurityConfig(tls_certificate="my certs/router.pem", tls_key="key.pem")
CACERT = "--cacert 'my certs/router.pem'"
KEY = '-H "Authorization: Bearer $PDSERVE_API_KEY"'


@pytest.mark.parametrize(
    ("security", "has_keys", "wanted"),
    [
        (PLAIN, False, []),
        (TLS, False, [CACERT]),
        (PLAIN, True, [KEY]),
        (TLS, True, [CACERT, KEY]),
    ],
)
def test_the_shown_command_has_what_tls_and_keys_want(
    security: SecurityConfig, has_keys: bool, wanted: list[str]
) -> None:
    url = f"{security.scheme}://127.0.0.1:8000"
    first, *between, last = curl_lines(url, "{}", security=security, has_keys=has_keys)
    assert first.startswith(f"curl {url}/v1/chat/completions ")
    assert [line.strip() for line in between] == [f"{each} \\" for each in wanted]
    assert last.strip() == "-d '{}'"
