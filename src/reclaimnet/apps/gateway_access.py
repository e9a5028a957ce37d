"""Who may do what at the gateway: tokens for programs, sessions for browsers, looking or acting.

The campus has two tokens: one that may do everything, and one that may only look. Besides, each
person of the register has one (see people). A program sends its token with each request. A browser
opens a link that carries the token behind `#` (which browsers keep to themselves), exchanges it
once for a cookie that scripts cannot read, and forgets it. The cookie is signed with the campus's
token and what is kept of the person's, so gateways share nothing; a new token ends its sessions.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from litestar.connection import ASGIConnection
from litestar.datastructures import Cookie
from litestar.exceptions import HTTPException
from litestar.handlers.base import BaseRouteHandler

from reclaimnet.apps.people import Caller, Person, has_secret, name_in

T = TypeVar("T")

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
    people: Callable[[], Mapping[str, Person]] = dict
    """Those of the register as it is now: who was removed from it is unknown at once."""

    def of_token(self, given: str) -> Caller | None:
        if _same(given, self.act):
            return Caller(may_act=not self.read_only)
        if self.look and _same(given, self.look):
            return Caller(may_act=False)
        name = name_in(given)
        person = self.people().get(name)
        if person is None or not has_secret(person, given):
            return None
        return self._caller(name, person)

    def of_session(self, cookie: str, now_s: float) -> Caller | None:
        expires, signature, name = (*cookie.split(".", 2), "", "")[:3]
        if not expires.isascii() or not expires.isdecimal() or int(expires) < now_s:
            return None
        if name:
            person = self.people().get(name)
            if person is None or not _same(signature, self._signed(name, person, expires)):
                return None
            return self._caller(name, person)
        for token in (self.act, self.look):
            if token and _same(signature, _signature(token, expires)):
                return self.of_token(token)
        return None

    def knows_still(self, caller: Caller) -> bool:
        """Whether what they were told they may is still so."""
        if not caller.name:
            return True
        person = self.people().get(caller.name)
        return person is not None and self._caller(caller.name, person) == caller

    def session(self, token: str, now_s: float) -> str:
        """What a browser that has shown this token, which is valid, keeps instead of it."""
        expires = str(int(now_s) + SESSION_S)
        name = name_in(token)
        person = self.people().get(name)
        if person is not None and token not in (self.act, self.look):
            return f"{expires}.{self._signed(name, person, expires)}.{name}"
        return f"{expires}.{_signature(token, expires)}"

    def _caller(self, name: str, person: Person) -> Caller:
        return Caller(
            name=name,
            role=person.role,
            owns=frozenset(person.owns),
            may_act=not self.read_only,
        )

    def _signed(self, name: str, person: Person, expires: str) -> str:
        """Neither the register nor the campus's token is enough to make one."""
        return _signature(f"{self.act} {name} {person.digest}", expires)


def session_cookie(value: str, *, port: int | None, secure: bool) -> Cookie:
    return Cookie(
        key=cookie_name(port),
        value=value,
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
            caller = keys.of_token(token)
        else:
            cookie = connection.cookies.get(cookie_name(connection.url.port), "")
            caller = keys.of_session(cookie, time.time())
        if caller is None:
            raise HTTPException(
                detail="the token is missing or wrong; send it as `Authorization: Bearer TOKEN`",
                status_code=HTTPStatus.UNAUTHORIZED,
                headers={"WWW-Authenticate": "Bearer"},
            )
        connection.state.caller = caller
        if connection.scope.get("method", "") in SAFE_METHODS:
            return
        if not token:
            _refuse_other_origins(connection)
        if not caller.may_act:
            why = "this gateway is" if keys.read_only else "your token is for"
            raise HTTPException(
                detail=f"{why} read-only: you can look at everything here, but change nothing",
                status_code=HTTPStatus.FORBIDDEN,
            )

    return check


def caller_of(connection: ASGIConnection[Any, Any, Any, Any]) -> Caller:
    """Whom the guard has let pass."""
    caller: Caller = connection.state.caller
    return caller


async def while_known(
    keys: Keys, caller: Caller, pieces: AsyncGenerator[T, None]
) -> AsyncGenerator[T, None]:
    """What takes long ends as soon as who asked for it may not any more."""
    async with aclosing(pieces):
        async for piece in pieces:
            if not keys.knows_still(caller):
                return
            yield piece


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
