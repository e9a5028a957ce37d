"""A campus with a gateway and two nodes, one of which means harm, on a real server."""

import contextlib
from pathlib import Path

from tests.live.embedded import until
from tests.live.ports import free_port

from reclaimnet.adapters.nats.access import CAMPUS_HOST, Access, Key, new_key
from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.adapters.nats.seals import Seal
from reclaimnet.adapters.nats.server import Server, Tls, start_server, stop_server
from reclaimnet.adapters.nats.witness import Witness
from reclaimnet.adapters.tls import ca
from reclaimnet.model.market import NodeId
from reclaimnet.wire import GATEWAY

HONEST, ROGUE = NodeId("honest"), NodeId("rogue")


class Ward:
    """A campus with a gateway and two nodes, one of which means harm."""

    def __init__(self, folder: Path) -> None:
        self.authority = ca.make_ca(folder / "ca")
        self.keys = {name: new_key(name) for name in (GATEWAY, HONEST, ROGUE)}
        key = ca.new_key()
        kept = ca.keep(
            folder / "tls",
            certificate=ca.issue(self.authority, CAMPUS_HOST, key, [CAMPUS_HOST]),
            key=key,
            authority=self.authority.pem,
        )
        self.tls = Tls(certificate=kept.certificate, key=kept.key)
        self.server: Server = start_server(
            folder / "nats", self.access(HONEST, ROGUE), port=free_port(), tls=self.tls
        )
        self._open = contextlib.AsyncExitStack()

    def access(self, *nodes: NodeId) -> Access:
        return Access(
            gateway=self.keys[GATEWAY].public,
            nodes={node: self.keys[node].public for node in nodes},
        )

    def witness(self, name: NodeId, **options) -> Witness:
        key = self.authority.key if name == GATEWAY else None
        seal = Seal(self.authority.pem.decode(), key)
        return Witness(name, key=self.keys[name], seal=seal, **options)

    async def join(self, name: NodeId, secret: str | Key | None = None, **options) -> Campus:
        campus = await Campus.connect(
            self.server.url,
            self.keys[name] if secret is None else secret,
            name,
            tls=options.pop("tls", None) or ca.server_known_by(self.authority.pem.decode()),
            prepare=name == GATEWAY,
            **options,
        )
        self._open.push_async_callback(campus.close)
        return campus

    async def close(self) -> None:
        await self._open.aclose()
        stop_server(self.server)


@contextlib.contextmanager
def refused_by_server(campus: Campus):
    """The server refuses a publication or a subscription in its own way: with an error, later."""
    heard: list[str] = []
    remember = campus._link._client._error_cb

    async def note(error: Exception) -> None:
        heard.append(str(error).lower())
        await remember(error)

    campus._link._client._error_cb = note
    yield heard
    campus._link._client._error_cb = remember


async def assert_cannot_publish(campus: Campus, subject: str, data: bytes = b"x") -> None:
    with refused_by_server(campus) as heard:
        await campus._link.client.publish(subject, data)
        await campus._link.client.flush()
        await until(lambda: any("permissions violation" in text for text in heard), "a refusal")
