"""Who may say what on the campus: one key for each program, and a list of subjects for each key.

The server believes keys (NKeys), not names: a node can publish only under its own name, and only
the gateway can ask a node for something. Who has no key yet is a newcomer, and can do one thing:
show an invitation to the gateway.
"""

import base64
import functools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import nkeys  # type: ignore[import-untyped]
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from reclaimnet.adapters.nats import streams
from reclaimnet.adapters.nats.seals import pack, unpack
from reclaimnet.errors import BadConfig
from reclaimnet.model.market import NodeId

SIGN_IN_TIMEOUT_S: Final = 30
"""A machine under heavy load takes seconds to say who it is, and is refused after this."""
ENROL: Final = "enrol"
CAMPUS_HOST: Final = "campus.reclaimnet"
"""The host that a campus's server proves to be, whatever its address."""
NEWCOMER: Final = NodeId("_newcomer")
"""A name that no node can have, with a password that is no secret: it opens nothing else."""
ANSWER_WITHIN: Final = "60s"
"""For so long a node may answer what it was asked."""

_READ: Final = (streams.JOBS, streams.NODES, streams.ROLES, f"OBJ_{streams.BUNDLES}")
"""What nodes read. Logs and journals are for people, who read them through the gateway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What a program shows to the server."""

    name: NodeId
    seed: str = field(repr=False)
    """Secret."""
    since: int = 0
    """When it was made, by the wall; 0 if that is unknown."""

    @property
    def public(self) -> str:
        return str(_pair(self.seed).public_key.decode())

    def sign(self, words: bytes) -> str:
        return pack(_pair(self.seed).sign(words))


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    gateway: str
    """The gateway's public key."""
    nodes: Mapping[NodeId, str] = field(default_factory=dict)
    """Each node's public key."""


def new_key(name: NodeId) -> Key:
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    return Key(name=name, seed=seed.decode())


def check_public_key(text: str) -> str:
    """Raises BadConfig if it could be anything but a user's public key: it goes into the server's
    configuration."""
    if len(text) != 56 or not text.startswith("U") or not text.isalnum() or not text.isascii():
        raise BadConfig("that is not a public key of a node")
    return text


def has_signed(public_key: str, words: bytes, signature: str) -> bool:
    """Whether who has that key says so."""
    try:
        # One byte says what kind of key it is; two behind it are a checksum.
        raw = base64.b32decode(check_public_key(public_key))[1:-2]
        Ed25519PublicKey.from_public_bytes(raw).verify(unpack(signature), words)
    except (InvalidSignature, ValueError, BadConfig):
        return False
    return True


def inbox(name: str) -> str:
    """Where answers to that program arrive: nobody else may listen there."""
    return f"_INBOX_{token(name)}"


def config_lines(access: Access) -> list[str]:
    """The server's `authorization` block."""
    users = [
        {"nkey": check_public_key(access.gateway)},
        {
            "user": str(NEWCOMER),
            "password": str(NEWCOMER),
            "permissions": {
                "publish": [ENROL],
                "subscribe": [f"{inbox(NEWCOMER)}.>"],
            },
        },
        *(
            {"nkey": check_public_key(key), "permissions": _node_permissions(node)}
            for node, key in sorted(access.nodes.items())
        ),
    ]
    return [
        "authorization {",
        f"  timeout: {SIGN_IN_TIMEOUT_S}",
        "  users: [",
        *(f"    {json.dumps(user)}" for user in users),
        "  ]",
        "}",
    ]


def _node_permissions(node: NodeId) -> dict[str, object]:
    me = token(node)
    return {
        "publish": {
            "allow": [
                ENROL,
                # Its own card, and what it tells others, under its own name.
                f"$KV.nodes.{me}",
                f"node.*.tell.{me}",
                f"journal.{me}.>",
                f"logs.*.{me}",
                # Without a scheduler every node may have to write any job and hold any role; that
                # only one succeeds is the store's comparison, and whether what it wrote is
                # believed is for those who read it (witness.py).
                "$KV.jobs.>",
                "$KV.roles.>",
                "$JS.API.INFO",
                "$JS.API.STREAM.NAMES",
                "$JS.FC.>",
                *(subject for stream in _READ for subject in _reading(stream)),
                # Cards are read many at a time.
                f"$JS.API.CONSUMER.MSG.NEXT.{streams.NODES}.*",
            ]
        },
        "subscribe": {"allow": [f"{inbox(node)}.>", f"node.{me}.>"]},
        "allow_responses": {"max": 1, "expires": ANSWER_WITHIN},
    }


def _reading(stream: str) -> tuple[str, ...]:
    return (
        f"$JS.API.STREAM.INFO.{stream}",
        f"$JS.API.STREAM.MSG.GET.{stream}",
        f"$JS.API.DIRECT.GET.{stream}",
        f"$JS.API.DIRECT.GET.{stream}.>",
        f"$JS.API.CONSUMER.CREATE.{stream}",
        f"$JS.API.CONSUMER.CREATE.{stream}.>",
        f"$JS.API.CONSUMER.INFO.{stream}.*",
        f"$JS.API.CONSUMER.DELETE.{stream}.*",
    )


@functools.lru_cache(maxsize=1 << 12)
def token(text: str) -> str:
    """One piece of a subject: what NATS reads as its syntax is escaped."""
    escaped = "".join(
        char if char.isascii() and (char.isalnum() or char in "_-") else _escape(char)
        for char in text
    )
    return escaped or "="


def untoken(piece: str) -> str:
    """What `token` was made of."""
    parts = re.split(r"((?:=[0-9A-F]{2})+)", piece)
    return "".join(
        bytes.fromhex(part.replace("=", "")).decode(errors="replace") if odd % 2 else part
        for odd, part in enumerate(parts)
    ).removesuffix("=")


def _escape(char: str) -> str:
    return "".join(f"={byte:02X}" for byte in char.encode())


@functools.lru_cache(maxsize=1 << 10)
def _pair(seed: str) -> nkeys.KeyPair:
    try:
        return nkeys.from_seed(bytearray(seed.encode()))
    except nkeys.NkeysError as error:
        raise BadConfig("that is not the key of a program on this campus") from error
