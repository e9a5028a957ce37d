"""Both ends of a connection prove who they are, and nobody else gets in."""

import socket
import ssl
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID
from OpenSSL import SSL
from tests import plain_tls

from reclaimnet.adapters.tls import ca
from reclaimnet.adapters.vault.pace import Pace
from reclaimnet.adapters.vault.stream import Distrust, Stream
from reclaimnet.errors import BadConfig, Forbidden
from reclaimnet.model.market import NodeId


def certified(
    folder: Path, authority: ca.Authority, name: str, believes: ca.Authority | None = None
) -> ca.Credentials:
    key = ca.new_key()
    certificate = ca.issue(authority, name, ca.request_certificate(key, name))
    return ca.keep(
        folder / name, certificate=certificate, key=key, authority=(believes or authority).pem
    )


@contextmanager
def serving(context: SSL.Context) -> Iterator[tuple[socket.socket, Callable[[], str]]]:
    """A socket to a server that shakes hands, and what tells whom the server saw: it raises what
    the server raised."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    seen: list[str] = []
    failures: list[OSError] = []

    def serve() -> None:
        try:
            with closing(stream(far, context, server_side=True)) as tls:
                tls.handshake()
                seen.append(tls.peer)
                tls.send(1)
        except OSError as error:
            failures.append(error)

    def saw() -> str:
        thread.join()
        if failures:
            raise failures[0]
        return seen[0]

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield near, saw
    finally:
        near.close()
        thread.join()


def stream(connection: socket.socket, context: SSL.Context, *, server_side: bool) -> Stream:
    return Stream(connection, context, server_side=server_side, stopped=lambda: False, pace=Pace())


def shake_hands(server: SSL.Context, client: SSL.Context) -> str:
    """The common name the server sees; raises what either end raises, the client first."""
    with serving(server) as (near, saw):
        with closing(stream(near, client, server_side=False)) as tls:
            tls.handshake()
            tls.receive_header({1: 0})
        return saw()


def knock(server: SSL.Context, client: ssl.SSLContext) -> tuple[str, str]:
    """The same with another TLS library at the client's end; with the version, too."""
    with serving(server) as (near, saw):
        try:
            with client.wrap_socket(near) as tls:
                version = tls.version()
                tls.recv(1)
        except OSError:
            saw()  # The server knows better why.
            raise
        return str(version), saw()


def test_nodes_of_one_campus_know_each_other(tmp_path: Path) -> None:
    authority = ca.make_ca(tmp_path / "ca")
    server = ca.server_context(certified(tmp_path, authority, "node:a"))
    other = certified(tmp_path, authority, ca.node_name(NodeId("b")))
    assert shake_hands(server, ca.client_context(other)) == "node:b"
    assert knock(server, plain_tls.context(other)) == ("TLSv1.3", "node:b")
    assert ca.node_of("node:b") == "b"
    assert ca.node_of("user:b") is None


def test_strangers_are_refused_on_both_sides(tmp_path: Path) -> None:
    ours, theirs = ca.make_ca(tmp_path / "ours"), ca.make_ca(tmp_path / "theirs")
    honest = certified(tmp_path, ours, "node:honest")
    stranger = certified(tmp_path, theirs, "node:stranger", believes=ours)
    with pytest.raises(Distrust, match=r"(?i)unknown.ca|verify failed"):
        shake_hands(ca.server_context(honest), ca.client_context(stranger))
    with pytest.raises(Distrust, match="verify failed"):
        shake_hands(ca.server_context(stranger), ca.client_context(honest))


def test_a_connection_that_failed_is_over_for_both_directions(tmp_path: Path) -> None:
    ours, theirs = ca.make_ca(tmp_path / "ours"), ca.make_ca(tmp_path / "theirs")
    stranger = ca.server_context(certified(tmp_path, theirs, "node:stranger"))
    honest = ca.client_context(certified(tmp_path, ours, "node:honest"))
    with (
        serving(stranger) as (near, _),
        closing(stream(near, honest, server_side=False)) as tls,
    ):
        with pytest.raises(Distrust):
            tls.handshake()
        with pytest.raises(ConnectionError):
            tls.send(1, b"more")
        with pytest.raises(ConnectionError):
            tls.receive(1)


def test_nobody_gets_in_without_a_certificate_or_with_old_tls(tmp_path: Path) -> None:
    authority = ca.make_ca(tmp_path / "ca")
    kept = certified(tmp_path, authority, "node:a")
    with pytest.raises(OSError, match=r"(?i)certificate"):
        knock(ca.server_context(kept), plain_tls.context())
    old = plain_tls.context(kept)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(OSError, match=r"(?i)version|protocol"):
        knock(ca.server_context(kept), old)


def test_a_leaf_cannot_certify_others(tmp_path: Path) -> None:
    authority = ca.make_ca(tmp_path / "ca")
    honest = certified(tmp_path, authority, "node:honest")
    key = ca.new_key()
    leaf = x509.load_pem_x509_certificate(
        ca.issue(authority, "node:rogue", ca.request_certificate(key, "node:rogue"))
    )
    rogue = certified(
        tmp_path, ca.Authority(certificate=leaf, key=key), "node:forged", believes=authority
    )
    with rogue.certificate.open("ab") as file:
        file.write(ca.Authority(certificate=leaf, key=key).pem)
    with pytest.raises(OSError, match=r"(?i)certificate|ca|purpose"):
        shake_hands(ca.server_context(honest), ca.client_context(rogue))


def test_keys_are_for_their_user_alone(tmp_path: Path) -> None:
    authority = ca.make_ca(tmp_path / "ca")
    kept = certified(tmp_path, authority, "node:a")
    for key in (tmp_path / "ca/ca.key", kept.key):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_the_authority_is_made_once(tmp_path: Path) -> None:
    first, second = ca.make_ca(tmp_path / "ca"), ca.make_ca(tmp_path / "ca")
    assert first.pem == second.pem
    (tmp_path / "ca/ca.key").write_bytes(ca.key_pem(ca.new_key()))
    with pytest.raises(BadConfig, match="do not belong together"):
        ca.make_ca(tmp_path / "ca")
    (tmp_path / "ca/ca.key").write_bytes(b"gone")
    with pytest.raises(BadConfig, match="restore"):
        ca.load_ca(tmp_path / "ca")


def test_a_request_gets_only_the_name_it_was_given(tmp_path: Path) -> None:
    authority = ca.make_ca(tmp_path / "ca")
    key = ca.new_key()
    request = ca.request_certificate(key, "node:b")
    with pytest.raises(Forbidden, match="node:a"):
        ca.issue(authority, "node:a", request)
    for garbage in (b"", b"garbage", request[:-60], b"x" * (ca.MAX_REQUEST_BYTES + 1)):
        with pytest.raises(Forbidden):
            ca.issue(authority, "node:b", garbage)
    weak = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    with pytest.raises(Forbidden, match="P-256"):
        ca.issue(authority, "node:b", ca.request_certificate(weak, "node:b"))


def test_a_certificate_says_who_and_where(tmp_path: Path) -> None:
    authority = ca.make_ca(tmp_path / "ca")
    pem = ca.issue(authority, "node:a", ca.new_key(), ["lab-1.example.org", "10.0.0.7", "::1"])
    certificate = x509.load_pem_x509_certificate(pem)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["lab-1.example.org"]
    addresses = names.get_values_for_type(x509.IPAddress)
    assert [str(address) for address in addresses] == ["10.0.0.7", "::1"]
    subject = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    assert [name.value for name in subject] == ["node:a"]
    assert certificate.not_valid_after_utc <= authority.certificate.not_valid_after_utc


def test_credentials_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    kept = certified(tmp_path, ca.make_ca(tmp_path / "ca"), "node:a")
    kept.key.unlink()
    with pytest.raises(BadConfig, match="have the node certified again"):
        ca.server_context(kept)
