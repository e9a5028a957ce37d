"""The campus's register: nodes that were taken in, who is invited, and the people of the campus.

It is one file in the state directory of `rn up`. The gateway reads it, and `rn invite`, `rn revoke`
and `rn person` write it: whoever may write there is the operator.
"""

import base64
import binascii
import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from reclaimnet.adapters.nats.access import Access, check_public_key
from reclaimnet.adapters.tls import ca
from reclaimnet.apps.names import NAME, cannot_be
from reclaimnet.apps.people import Person, Role, new_token
from reclaimnet.errors import BadConfig, Forbidden, NotFound, UsageError
from reclaimnet.model.market import NodeId
from reclaimnet.model.units import DAY

MAX_NODES: Final = 10_000
MAX_INVITATIONS: Final = 1000
MAX_PEOPLE: Final = 10_000
MAX_INVITATION_CHARS: Final = 8192
STANDING: Final = 365 * DAY
"""How long the invitation for agents beside the campus stands; each `rn up` makes a new one."""
_PREFIX: Final = "rn1."


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """What a newcomer needs: where the campus is, how to know that it is the one, and a secret."""

    url: str
    ca: str
    """PEM."""
    secret: str

    def __str__(self) -> str:
        return _PREFIX + base64.urlsafe_b64encode(msgspec.json.encode(self)).decode().rstrip("=")


def read_invitation(text: str) -> Invitation:
    text = text.strip()
    if not text.startswith(_PREFIX) or len(text) > MAX_INVITATION_CHARS:
        raise UsageError("that is no invitation to a campus; its operator makes one: rn invite")
    packed = text.removeprefix(_PREFIX)
    try:
        data = base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4))
        return msgspec.json.decode(data, type=Invitation)
    except (binascii.Error, ValueError, msgspec.DecodeError) as error:
        raise UsageError("the invitation is damaged; copy all of it, or ask for another") from error


class _Open(msgspec.Struct, kw_only=True):
    """An invitation that nobody has used yet."""

    digest: str
    until: int
    """Wall time."""
    node: str | None = None
    """Whom it is for; None means whoever has it."""
    once: bool = True


class _Book(msgspec.Struct, kw_only=True):
    nodes: dict[str, str] = {}
    invitations: list[_Open] = []
    people: dict[str, Person] = {}


class Register:
    """Any number of programs may have one open on the same directory."""

    def __init__(self, state: Path) -> None:
        self._path = state / "register.json"
        self._people: tuple[int, Mapping[str, Person]] = (-1, {})

    def stamp(self) -> int:
        """Changes whenever the register does."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return 0
        # A file's time moves in ticks of some milliseconds; a replaced file is another file.
        return hash((status.st_mtime_ns, status.st_ino, status.st_size))

    def access(self, gateway: str) -> Access:
        nodes = {NodeId(node): key for node, key in self._read().nodes.items()}
        return Access(gateway=gateway, nodes=nodes)

    def nodes(self) -> list[NodeId]:
        return [NodeId(node) for node in sorted(self._read().nodes)]

    def invite(self, *, valid: int, node: NodeId | None = None, once: bool = True) -> str:
        """A new secret; only its hash is kept."""
        secret = secrets.token_urlsafe(24)
        now = time.time_ns()
        with self._changing() as book:
            book.invitations = [known for known in book.invitations if known.until > now]
            if not once:  # There is one that always stands, for agents beside the campus.
                book.invitations = [known for known in book.invitations if known.once]
            if len(book.invitations) >= MAX_INVITATIONS:
                raise UsageError(f"{MAX_INVITATIONS} invitations are open; wait until some expire")
            opened = _Open(digest=_digest(secret), until=now + valid, node=node, once=once)
            book.invitations.append(opened)
        return secret

    def take_in(self, *, secret: str, node: NodeId, public_key: str, lives: bool) -> None:
        """Note the node and its key. `lives` says whether one of that name is on the campus now:
        then only the same key is welcome. Raises Forbidden."""
        check_public_key(public_key)
        now = time.time_ns()
        with self._changing() as book:
            found = [
                known
                for known in book.invitations
                if known.until > now and hmac.compare_digest(known.digest, _digest(secret))
            ]
            if not found:
                raise Forbidden(
                    "the invitation is not valid any more; ask the operator for another: rn invite"
                )
            invitation = found[0]
            if invitation.node is not None and invitation.node != node:
                raise Forbidden(f"the invitation is for {invitation.node}, not for {node}")
            known_key = book.nodes.get(node)
            if known_key is not None and known_key != public_key and lives:
                raise Forbidden(
                    f"a node called {node} is on this campus already; give this one another --name"
                )
            if known_key is None and len(book.nodes) >= MAX_NODES:
                raise Forbidden(f"the campus has {MAX_NODES} nodes, and takes no more")
            book.nodes[node] = public_key
            if invitation.once:
                book.invitations.remove(invitation)

    def revoke(self, node: NodeId) -> None:
        with self._changing() as book:
            if book.nodes.pop(node, None) is None:
                raise NotFound(f"no node called {node} was ever taken in")
            book.invitations = [known for known in book.invitations if known.node != node]

    def people(self) -> Mapping[str, Person]:
        """As they are now; the file is read only when it has changed."""
        stamp = self.stamp()
        if self._people[0] != stamp:
            self._people = (stamp, self._read().people)
        return self._people[1]

    def add_person(self, name: str, *, role: Role, owns: tuple[str, ...]) -> str:
        """The person's token, which is told only now: its hash is what is kept."""
        token, digest = new_token(name)
        wrong = [node for node in owns if not NAME.fullmatch(node)]
        if wrong:
            raise UsageError(f"{cannot_be(wrong[0], 'a node')} (`rn nodes` lists them)")
        with self._changing() as book:
            if name in book.people:
                raise UsageError(
                    f"there is a person called {name} already; for a new token or another role, "
                    f"`rn person remove {name}` first: their jobs stay theirs"
                )
            if len(book.people) >= MAX_PEOPLE:
                raise UsageError(f"the campus has {MAX_PEOPLE} people, and takes no more")
            book.people[name] = Person(digest=digest, role=role, owns=tuple(sorted(set(owns))))
        return token

    def remove_person(self, name: str) -> None:
        with self._changing() as book:
            if book.people.pop(name, None) is None:
                raise NotFound(f"there is no person called {name}; `rn person list` lists them")

    def _read(self) -> _Book:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Book)
        except FileNotFoundError:
            return _Book()
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadConfig(
                f"{self._path} is damaged ({error}); restore it, or remove it and invite all anew"
            ) from error

    @contextlib.contextmanager
    def _changing(self) -> Iterator[_Book]:
        """One at a time; nothing is written if it raises."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(
            self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            book = self._read()
            yield book
            ca.write_private(self._path, msgspec.json.encode(book))
        finally:
            os.close(lock)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def register_here(state: Path) -> Register:
    """That of the campus which was made here, whether or not it runs. Raises if none was."""
    if not (state / "ca").is_dir():
        raise UsageError(
            f"there is no campus in {state}: say this on the machine where `rn up` runs, as the "
            "same user"
        )
    return Register(state)


def invitation_for(state: Path, *, node: NodeId | None, valid: int) -> Invitation:
    """For another machine, to be used once. Raises if no campus runs here that others can reach."""
    try:
        left = json.loads((state / "campus.json").read_text())
        # On all addresses means on none that others could use.
        url = str(left["nats_url"]).replace("//0.0.0.0:", f"//{socket.gethostname()}:")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            "no campus runs here: invite from the machine where `rn up` runs, as the same user"
        ) from error
    if node is not None and not NAME.fullmatch(node):
        raise UsageError(cannot_be(node, "a node"))
    if valid <= 0:
        raise UsageError("an invitation has to be valid for a while; say for example --valid 10m")
    secret = Register(state).invite(node=node, valid=valid)
    return Invitation(url=url, ca=ca.load_ca(state / "ca").pem.decode(), secret=secret)
