"""A login: all that a person's commands need to find a campus, know it, and be known by it."""

import base64
import binascii
import json
import socket
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from reclaimnet.adapters.tls import ca
from reclaimnet.errors import UsageError

MAX_LOGIN_CHARS: Final = 8192
_PREFIX: Final = "rnl1."


class Login(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    token: str
    ca: str | None = None
    """PEM; None if the gateway speaks plain HTTP."""

    def __str__(self) -> str:
        return _PREFIX + base64.urlsafe_b64encode(msgspec.json.encode(self)).decode().rstrip("=")


def read_login(text: str) -> Login:
    text = text.strip()
    if not text.startswith(_PREFIX) or len(text) > MAX_LOGIN_CHARS:
        raise UsageError("that is no login; an operator makes one: rn person add NAME --login")
    packed = text.removeprefix(_PREFIX)
    try:
        data = base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4))
        return msgspec.json.decode(data, type=Login)
    except (binascii.Error, ValueError, msgspec.DecodeError) as error:
        raise UsageError("the login is damaged; copy all of it, or ask for another") from error


def gateway_here(state: Path) -> tuple[str, str | None]:
    """The address under which others find the gateway that runs here, and by what they know it.
    Raises if none runs."""
    try:
        left = json.loads((state / "campus.json").read_text())
        gateway, nats = urlsplit(left["gateway_url"]), urlsplit(left["nats_url"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            "no campus runs here: make logins on the machine where `rn up` runs, as the same user"
        ) from error
    host = nats.hostname or ""
    if host in ("0.0.0.0", "::"):
        # Our own commands go by loopback then, which leads others nowhere.
        host = socket.gethostname()
    url = f"{gateway.scheme}://{f'[{host}]' if ':' in host else host}:{gateway.port}"
    is_secure = gateway.scheme == "https"
    return url, ca.load_ca(state / "ca").pem.decode() if is_secure else None
