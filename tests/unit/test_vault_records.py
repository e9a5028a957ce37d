"""TLS in memory: what one end seals the other opens, however it is cut up on the way."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from OpenSSL import SSL

from reclaimnet.adapters.tls import ca
from reclaimnet.adapters.vault.records import Records

AT_ONCE = 40_000
RECORD_BYTES = 16 << 10
"""What a record of TLS holds at the most."""
Ends = tuple[Records, Records]


@pytest.fixture
def ends(tmp_path: Path) -> Ends:
    """Two ends that have shaken hands."""
    authority = ca.make_ca(tmp_path / "ca")
    contexts = []
    for make, name in ((ca.client_context, "node:a"), (ca.server_context, "node:b")):
        key = ca.new_key()
        certificate = ca.issue(authority, name, ca.request_certificate(key, name))
        kept = ca.keep(tmp_path / name, certificate=certificate, key=key, authority=authority.pem)
        contexts.append(make(kept))
    client, server = (Records(context, at_once=AT_ONCE) for context in contexts)
    client.set_connect_state()
    server.set_accept_state()
    shaken: set[Records] = set()
    while len(shaken) < 2:
        for end, other in ((client, server), (server, client)):
            try:
                end.do_handshake()
                shaken.add(end)
            except SSL.WantReadError:
                pass
            for piece in outgoing(end):
                put(other, piece)
                if other in shaken:
                    assert opened(other, 1) == b""
    return client, server


def outgoing(end: Records) -> Iterator[bytes]:
    while sealed := end.sealed():
        assert len(sealed) <= AT_ONCE
        yield bytes(sealed)


def put(end: Records, sealed: bytes) -> None:
    end.incoming[: len(sealed)] = sealed
    end.came(len(sealed))


def opened(end: Records, at_most: int) -> bytes:
    into = memoryview(bytearray(at_most))
    try:
        return bytes(into[: end.open_into(into)])
    except SSL.WantReadError:
        return b""


@pytest.mark.parametrize("cut", [1, 4_099, RECORD_BYTES + 21, AT_ONCE])
def test_what_is_sealed_is_opened_wherever_it_was_cut(ends: Ends, cut: int) -> None:
    client, server = ends
    sent = random.Random(1).randbytes(5 * RECORD_BYTES + 7)
    for source, target in ((client, server), (server, client)):
        assert source.send(sent) == len(sent), "encrypted in one go"
        sealed = b"".join(outgoing(source))
        came = bytearray()
        for begin in range(0, len(sealed), cut):
            put(target, sealed[begin : begin + cut])
            while piece := opened(target, 10_000):
                came += piece
        assert bytes(came) == sent


def test_memory_is_filled_over_the_bounds_of_records(ends: Ends) -> None:
    client, server = ends
    client.send(b"x" * 2 * RECORD_BYTES)
    (sealed,) = outgoing(client)
    put(server, sealed)
    assert len(opened(server, RECORD_BYTES + 100)) == RECORD_BYTES + 100
    assert len(opened(server, 2 * RECORD_BYTES)) == RECORD_BYTES - 100


def test_what_was_changed_on_the_way_is_not_opened(ends: Ends) -> None:
    client, server = ends
    client.send(b"x" * 100)
    sealed = bytearray(next(outgoing(client)))
    sealed[-1] ^= 1
    put(server, bytes(sealed))
    with pytest.raises(SSL.Error, match="bad record mac"):
        server.open_into(memoryview(bytearray(100)))
