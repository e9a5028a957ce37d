"""The campus's own certificate authority, and TLS 1.3 in which both ends say who they are."""

import ipaddress
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from OpenSSL import SSL

from reclaimnet.errors import BadConfig, Forbidden
from reclaimnet.model.market import NodeId

CA_DAYS: Final = 3650
LEAF_DAYS: Final = 397
CLOCK_SKEW: Final = timedelta(hours=1)
"""Certificates are valid from a little before now, since campus clocks are not all alike."""
MAX_REQUEST_BYTES: Final = 16 << 10
MAX_NAMES: Final = 32
GATEWAY: Final = "gateway"
"""The common name of the campus's gateways, which fetch output for its users."""
NODE_PREFIX: Final = "node:"
_CERTIFICATE: Final = "ca.crt"
_KEY: Final = "ca.key"
_PARTIAL_WRITE: Final = 1
"""SSL_MODE_ENABLE_PARTIAL_WRITE, which pyOpenSSL sets and has no name for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """Who signs. Its key never leaves the machine it was made on."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Where one end keeps what it shows to others, and whom it believes."""

    certificate: Path
    key: Path
    authority: Path


def node_name(node: NodeId) -> str:
    """The common name in the certificate of a node's agent."""
    return NODE_PREFIX + node


def node_of(common_name: str) -> NodeId | None:
    """The node a common name speaks for, if it is a node's."""
    if not common_name.startswith(NODE_PREFIX):
        return None
    return NodeId(common_name.removeprefix(NODE_PREFIX))


def make_ca(folder: Path, *, name: str = "ReclaimNet campus") -> Authority:
    """The authority kept in the folder; made there first if there is none yet."""
    if (folder / _CERTIFICATE).exists():
        return load_ca(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    authority = Authority(certificate=certificate, key=key)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The certificate comes last: a folder that has one has all of it.
    write_private(folder / _KEY, key_pem(key))
    _write(folder / _CERTIFICATE, authority.pem, mode=0o644)
    return authority


def load_ca(folder: Path) -> Authority:
    try:
        certificate = x509.load_pem_x509_certificate((folder / _CERTIFICATE).read_bytes())
        key = serialization.load_pem_private_key((folder / _KEY).read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise BadConfig(
            f"the campus authority in {folder} cannot be read ({error}); restore it from backup"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BadConfig(f"the key in {folder / _KEY} is not an elliptic-curve key; restore it")
    if key.public_key() != certificate.public_key():
        raise BadConfig(f"the certificate and the key in {folder} do not belong together")
    return Authority(certificate=certificate, key=key)


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def request_certificate(key: ec.EllipticCurvePrivateKey, common_name: str) -> bytes:
    """What an agent sends to be certified (PEM); the key stays where it is."""
    return (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )


def issue(
    authority: Authority,
    common_name: str,
    subject: bytes | ec.EllipticCurvePrivateKey,
    names: Sequence[str] = (),
) -> bytes:
    """A certificate (PEM) for a request's (PEM) or a private key's public key.

    The name is the caller's decision: one asked for in a request that differs is refused.
    `names` are the host names and addresses under which the holder may serve.
    """
    public = subject if isinstance(subject, bytes) else subject.public_key()
    if isinstance(public, bytes):
        public = _requested_key(public, common_name)
    if len(names) > MAX_NAMES:
        raise Forbidden(f"at most {MAX_NAMES} names fit in one certificate; ask for fewer")
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
        .issuer_name(authority.certificate.subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(
            min(now + timedelta(days=LEAF_DAYS), authority.certificate.not_valid_after_utc)
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage(
                [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            ),
            critical=False,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
            critical=False,
        )
    )
    if names:
        builder = builder.add_extension(
            x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False
        )
    certificate = builder.sign(authority.key, hashes.SHA256())
    return certificate.public_bytes(serialization.Encoding.PEM)


def keep(
    folder: Path, *, certificate: bytes, key: ec.EllipticCurvePrivateKey, authority: bytes
) -> Credentials:
    """Write one end's credentials into a folder; only its user can read the key."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = Credentials(
        certificate=folder / "node.crt", key=folder / "node.key", authority=folder / _CERTIFICATE
    )
    write_private(kept.key, key_pem(key))
    _write(kept.certificate, certificate, mode=0o644)
    _write(kept.authority, authority, mode=0o644)
    return kept


def server_context(credentials: Credentials) -> SSL.Context:
    """Accepts only TLS 1.3 clients that the same authority has certified."""
    context = _mutual(credentials)
    # Each connection is one long transfer: no session is ever resumed.
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    return context


def client_context(credentials: Credentials) -> SSL.Context:
    """Talks only to TLS 1.3 servers that the same authority has certified.

    Who the server is, its common name says; the address it happens to have proves nothing here,
    since lent machines change theirs.
    """
    return _mutual(credentials)


def server_known_by(authority: str) -> ssl.SSLContext:
    """To talk to a server that proves by this authority (PEM) which host it is. The certificate of
    a node proves to be none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cadata=authority)
    except ssl.SSLError as error:
        raise BadConfig(f"the campus's authority cannot be read ({error}); join anew") from error
    return context


def write_private(path: Path, data: bytes) -> None:
    """Readable by its user alone, from the first byte on."""
    _write(path, data, mode=0o600)


def _mutual(credentials: Credentials) -> SSL.Context:
    context = SSL.Context(SSL.TLS_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT)
    # What is given to it is encrypted in one go, not a record at a time.
    context.clear_mode(_PARTIAL_WRITE)
    try:
        context.use_certificate_chain_file(str(credentials.certificate))
        context.use_privatekey_file(str(credentials.key))
        context.check_privatekey()
        context.load_verify_locations(str(credentials.authority))
    except SSL.Error as error:
        raise BadConfig(
            f"the credentials in {credentials.key.parent} cannot be used ({error}); "
            "have the node certified again"
        ) from error
    return context


def requested_name(request: bytes) -> str:
    """Whom a certificate request (PEM) speaks for; its signature is checked."""
    parsed, _ = _parsed_request(request)
    asked = [str(name.value) for name in parsed.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if len(asked) != 1:
        raise Forbidden("the certificate request must name exactly one node")
    return asked[0]


def _parsed_request(
    request: bytes,
) -> tuple[x509.CertificateSigningRequest, CertificatePublicKeyTypes]:
    if len(request) > MAX_REQUEST_BYTES:
        raise Forbidden("the certificate request is too large; send one made by this program")
    try:
        parsed = x509.load_pem_x509_csr(request)
        if not parsed.is_signature_valid:
            raise InvalidSignature
        return parsed, parsed.public_key()
    except (ValueError, InvalidSignature, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise Forbidden("the certificate request is not valid; make a new one") from error


def _requested_key(request: bytes, common_name: str) -> ec.EllipticCurvePublicKey:
    asked = requested_name(request)
    if asked != common_name:
        raise Forbidden(f"the certificate request is for {asked!r}, not for {common_name!r}")
    _, key = _parsed_request(request)
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
        raise Forbidden("the certificate request is not for a P-256 key; make a new one")
    return key


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write(path: Path, data: bytes, *, mode: int) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
