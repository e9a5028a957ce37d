"""How a machine comes to be a node of a campus: once by invitation, from then on by its keys."""

import asyncio
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reclaimnet.adapters.nats.access import NEWCOMER, Key, new_key
from reclaimnet.adapters.nats.campus import Campus, EnrolmentAsked
from reclaimnet.adapters.nats.seals import Seal
from reclaimnet.adapters.nats.witness import LEASE, Witness
from reclaimnet.adapters.tls import ca
from reclaimnet.apps.register import read_invitation
from reclaimnet.errors import Forbidden, Unavailable
from reclaimnet.model.market import NodeId

CONNECT_AGAIN_S: Final = 1.0
REFUSALS_AFTER_ENROLMENT: Final = 10
SEALED: Final = "sealed"

_log = logging.getLogger("reclaimnet.agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What makes this machine a node of the campus: a key for the server, a certificate for
    others, and the authority by which it knows both."""

    key: Key
    credentials: ca.Credentials
    sealed: Path
    """There if every job of the campus is known to have its seal."""

    @property
    def tls(self) -> ssl.SSLContext:
        return ca.server_known_by(self.credentials.authority.read_text())

    def witness(self, lease: int) -> Witness:
        return Witness(
            self.key.name,
            key=self.key,
            seal=Seal(self.credentials.authority.read_text()),
            strict=self.sealed.exists(),
            on_strict=self.sealed.touch,
            lease=lease,
        )


async def joined(
    *, url: str, invitation: str, node: NodeId, folder: Path, lease: int = LEASE
) -> tuple[Campus, Membership]:
    """As whom the folder says that we joined before, or else by the invitation. The campus may come
    up after us; keep trying, but say so."""
    said = ""
    refusals_left = REFUSALS_AFTER_ENROLMENT
    while True:
        try:
            membership = _kept(invitation, node, folder)
            if membership is None:
                membership = await _enrol(url, invitation, node, folder)
            campus = await Campus.connect(
                url,
                membership.key,
                node,
                tls=membership.tls,
                prepare=False,
                witness=membership.witness(lease),
            )
            return campus, membership
        except Forbidden:
            # The server may not have heard of us yet, though the gateway has.
            refusals_left -= 1
            if not refusals_left or _kept(invitation, node, folder) is None:
                raise
        except Unavailable as error:
            if str(error) != said:
                said = str(error)
                _log.warning("waiting for the campus: %s", error)
        await asyncio.sleep(CONNECT_AGAIN_S)


def _kept(invitation: str, node: NodeId, folder: Path) -> Membership | None:
    """Of this campus: its authority is the one that the invitation names."""
    kept = ca.Credentials(
        certificate=folder / "node.crt", key=folder / "node.key", authority=folder / "ca.crt"
    )
    seed = folder / "campus.key"
    try:
        if kept.authority.read_text() != read_invitation(invitation).ca:
            return None
        key = Key(name=node, seed=seed.read_text(), since=seed.stat().st_mtime_ns)
        return Membership(key=key, credentials=kept, sealed=folder / SEALED)
    except FileNotFoundError:
        return None


async def _enrol(url: str, invitation: str, node: NodeId, folder: Path) -> Membership:
    """Show the invitation to a gateway; what it answers is kept for good."""
    known = read_invitation(invitation)
    tls_key, key = ca.new_key(), new_key(node)
    asked = EnrolmentAsked(
        invitation=known.secret,
        certificate_request=ca.request_certificate(tls_key, ca.node_name(node)).decode(),
        public_key=key.public,
    )
    newcomer = await Campus.connect(
        url, "", NEWCOMER, tls=ca.server_known_by(known.ca), prepare=False
    )
    try:
        enrolment = await newcomer.enrol(asked)
    finally:
        await newcomer.close()
    if enrolment.ca != known.ca:
        raise Forbidden("the campus is another than the one of the invitation; ask for a new one")
    credentials = ca.keep(
        folder,
        certificate=enrolment.certificate.encode(),
        key=tls_key,
        authority=enrolment.ca.encode(),
    )
    ca.write_private(folder / "campus.key", key.seed.encode())
    sealed = folder / SEALED
    sealed.unlink(missing_ok=True)
    if enrolment.seals:
        sealed.touch()
    return Membership(key=key, credentials=credentials, sealed=sealed)
