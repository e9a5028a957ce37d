"""Who may do what at the gateway: tokens for programs, sessions for browsers, looking or acting.

There are two tokens: one that may do everything, and one that may only look. A program sends its
token with each request. A browser opens a link that carries the token behind `#` (which browsers
keep to themselves), exchanges it once for a cookie that scripts cannot read, and forgets it. The
cookie is signed with the token, so gateways share nothing; a new token ends all sessions.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

from litestar.connection import ASGIConnection
from litestar.datastructures import Cookie
from litestar.exceptions import HTTPException
from litestar.handlers.base import BaseRouteHandler

SESSION_S: Final = 30 * 24 * 3600
"""A browser is asked for the token again after a month."""
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_COOKIE: Final = "reclaimnet-session"


class Access(StrEnum):
    LOOK = "look"
    ACT = "act"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """`look` may be empty: then nobody can only look. With `read_only` nobody may act."""

    act: str
    look: str = ""
    read_only: bool = False

    def of_token(self, given: str) -> Access | None:
        if _same(given, self.act):
            return Access.LOOK if self.read_only else Access.ACT
        return Access.LOOK if self.look and _same(given, self.look) else None

    def of_session(self, cookie: str, now_s: float) -> Access | None:
        expires, _, signature = cookie.partition(".")
        if not expires.isdecimal() or int(expires) < now_s:
            return None
        for token in (self.act, self.look):
            if token and _same(signature, _signature(token, expires)):
                return self.of_token(token)
        return None


def session_cookie(token: str, *, port: int | None, secure: bool, now_s: float) -> Cookie:
    expires = str(int(now_s) + SESSION_S)
    return Cookie(
        key=cookie_name(port),
        value=f"{expires}.{_signature(token, expires)}",
        path="/",
        max_age=SESSION_S,
        secure=secure,
        httponly=True,
        samesite="strict",
    )


def cookie_name(port: int | None) -> str:
    """Browsers give a cookie to every port of a host, and two campuses on one must not clash."""
    return f"{_COOKIE}-{port or 'default'}"


def bearer(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def guard(keys: Keys) -> Callable[[ASGIConnection[Any, Any, Any, Any], BaseRouteHandler], None]:
    def check(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
        if handler.opt.get("public"):
            return
        token = bearer(connection.headers)
        if token:
            access = keys.of_token(token)
        else:
            cookie = connection.cookies.get(cookie_name(connection.url.port), "")
            access = keys.of_session(cookie, time.time())
        if access is None:
            raise HTTPException(
                detail="the token is missing or wrong; send it as `Authorization: Bearer TOKEN`",
                status_code=HTTPStatus.UNAUTHORIZED,
                headers={"WWW-Authenticate": "Bearer"},
            )
        if connection.scope.get("method", "") in SAFE_METHODS:
            return
        if not token:
            _refuse_other_origins(connection)
        if access is not Access.ACT:
            why = "this gateway is" if keys.read_only else "your token is for"
            raise HTTPException(
                detail=f"{why} read-only: you can look at everything here, but change nothing",
                status_code=HTTPStatus.FORBIDDEN,
            )

    return check


def _refuse_other_origins(connection: ASGIConnection[Any, Any, Any, Any]) -> None:
    """A cookie travels with whatever any page of this site sends, and to a browser another port of
    the same host is the same site. Browsers do not let pages lie about their origin."""
    origin = urlsplit(connection.headers.get("Origin", ""))
    if not origin.netloc or origin.netloc != connection.headers.get("Host", ""):
        raise HTTPException(
            detail="with a browser's session only the campus's own page may change something",
            status_code=HTTPStatus.FORBIDDEN,
        )


def _signature(token: str, expires: str) -> str:
    words = f"reclaimnet session until {expires}".encode()
    return hmac.new(token.encode(), words, hashlib.sha256).hexdigest()


def _same(given: str, expected: str) -> bool:
    return secrets.compare_digest(given.encode(), expected.encode())
