"""Commands on the router's host know its certificate itself: no CA is asked, no name compared."""

import ssl

from pdserve.core.errors import ConfigError


def pinned_context(certificate: str) -> ssl.SSLContext:
    """For HTTPS: who answers has this certificate. Raises ConfigError where it cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(certificate)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"{certificate}: cannot be used as a certificate: {error}") from error
    return context
