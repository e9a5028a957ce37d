"""TLS as others would speak it: with Python's own library, which is not the one that is tested."""

import ssl

from reclaimnet.adapters.tls import ca


def context(credentials: ca.Credentials | None = None, *, server: bool = False) -> ssl.SSLContext:
    """Shows these credentials, and believes anybody."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    if credentials is not None:
        made.load_cert_chain(credentials.certificate, credentials.key)
    return made
