"""People of the campus: who someone is, and what they may do with whose jobs and machines.

Everybody may see that a job exists, whose it is and how it does: that is how a shared queue stays
fair. What it runs, what it was told, what it wrote and why it moved is for its user and operators.
"""

import dataclasses
import hashlib
import hmac
import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from reclaimnet.apps.names import NAME, cannot_be
from reclaimnet.errors import Forbidden, UsageError
from reclaimnet.model.market import NodeId
from reclaimnet.model.work import JobRecord

NOBODY: Final = "campus"
"""Whose jobs are that were submitted with the campus's own token, which has no name."""


class Role(StrEnum):
    USER = "user"
    OPERATOR = "operator"


class Person(msgspec.Struct, frozen=True, kw_only=True):
    """As the register keeps them."""

    digest: str
    """Of the secret in their token, which nobody keeps but they."""
    role: Role = Role.USER
    owns: tuple[str, ...] = ()
    """The nodes they may lend and reclaim from afar; on the machine itself its account may."""


def new_token(name: str) -> tuple[str, str]:
    """A token for the person, and what is kept of it."""
    if not NAME.fullmatch(name):
        raise UsageError(cannot_be(name, "a person"))
    if name == NOBODY:
        raise UsageError(
            f"{name!r} cannot be a person's name: jobs of the campus's own token go by it"
        )
    secret = secrets.token_urlsafe(24)
    return f"{name}.{secret}", _digest(secret)


def name_in(token: str) -> str:
    """Who a token claims to be of: the secret behind the last dot has none itself."""
    return token.rpartition(".")[0]


def has_secret(person: Person | None, token: str) -> bool:
    """It takes the same time for people that there are not."""
    expected = person.digest if person is not None else _digest("")
    is_right = hmac.compare_digest(_digest(token.rpartition(".")[2]), expected)
    return is_right and person is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks now. Without a name it is who has a token of the campus itself."""

    name: str = ""
    role: Role = Role.OPERATOR
    owns: frozenset[str] = frozenset()
    may_act: bool = True

    def is_behind(self, record: JobRecord) -> bool:
        return self.role is Role.OPERATOR or record.spec.user == self.name

    def user_of(self, claimed: str | None) -> str:
        """Whose a job is that this caller submits: only operators submit for others."""
        if self.role is Role.OPERATOR:
            return claimed or self.name or NOBODY
        return self.name

    def check_job(self, record: JobRecord, to_do: str) -> None:
        if not self.is_behind(record):
            raise Forbidden(
                f"job {record.id} is {record.spec.user}'s, and you are {self.name}; "
                f"only its user and operators may {to_do}"
            )

    def check_node(self, node: NodeId, to_do: str) -> None:
        if self.role is not Role.OPERATOR and node not in self.owns:
            raise Forbidden(
                f"{node[:64]} is not registered as yours; only its owner and operators may {to_do} "
                "it from here, and whoever has its account on the machine itself"
            )

    def check_operator(self, to_do: str) -> None:
        if self.role is not Role.OPERATOR:
            raise Forbidden(f"only operators may {to_do}; ask one")

    def shown(self, record: JobRecord) -> JobRecord:
        """The record without what is only for its user."""
        if self.is_behind(record):
            return record
        spec = dataclasses.replace(record.spec, command=(), env=(), bundle=None, workdir=None)
        return dataclasses.replace(record, spec=spec)


def _digest(secret: str) -> str:
    # The secret is random and long: what makes guessing slow would only make requests slow.
    return hashlib.sha256(secret.encode()).hexdigest()
