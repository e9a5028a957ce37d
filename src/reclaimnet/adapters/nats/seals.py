"""The campus's seal: what only the campus can say of a job, and everybody can check."""

import base64
import binascii
import dataclasses
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from reclaimnet.errors import BadConfig
from reclaimnet.model.work import JobRecord
from reclaimnet.wire import encode_json

_ALGORITHM: Final = ec.ECDSA(hashes.SHA256())


class Seal:
    """Of the campus's authority: every node has had its certificate since it was taken in, so that
    nothing needs to be handed out. Only the gateway has the key."""

    def __init__(self, certificate: str, key: ec.EllipticCurvePrivateKey | None = None) -> None:
        try:
            public = x509.load_pem_x509_certificate(certificate.encode()).public_key()
        except ValueError as error:
            raise BadConfig(
                f"the campus's authority cannot be read ({error}); join anew"
            ) from error
        if not isinstance(public, ec.EllipticCurvePublicKey):
            raise BadConfig("the campus's authority has no elliptic-curve key; join anew")
        self._public = public
        self._key = key

    @property
    def can_sign(self) -> bool:
        return self._key is not None

    def sign(self, words: bytes) -> str:
        assert self._key is not None, "only the campus signs"
        return pack(self._key.sign(words, _ALGORITHM))

    def holds(self, words: bytes, signature: str) -> bool:
        try:
            self._public.verify(unpack(signature), words, _ALGORITHM)
        except (InvalidSignature, ValueError):
            return False
        return True


def job_words(record: JobRecord) -> bytes:
    """What runs, for whom and by which right: all that its user asked for."""
    asked = [record.id, record.submitted_at, _but_defaults(record.spec)]
    # No certificate begins like this, so that nothing signed here could be taken for one.
    return b"reclaimnet job\n" + encode_json(asked)


def cancel_words(record: JobRecord) -> bytes:
    return b"reclaimnet cancel\n" + encode_json([record.id, record.submitted_at])


def pack(signature: bytes) -> str:
    return base64.urlsafe_b64encode(signature).decode().rstrip("=")


def unpack(text: str) -> bytes:
    """Raises ValueError."""
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error


def _but_defaults(value: Any) -> Any:
    """A field that a later version adds changes nothing for jobs that do not use it: they keep
    their seal through an upgrade."""
    if dataclasses.is_dataclass(value):
        told = ((each, getattr(value, each.name)) for each in dataclasses.fields(value))
        return {each.name: _but_defaults(held) for each, held in told if held != each.default}
    if isinstance(value, tuple):
        return [_but_defaults(each) for each in value]
    return value
