"""The doors of ReclaimNet: each parser that faces the outside, as a function of bytes.

A door either understands what it is given or refuses it with one of our own errors. Whatever else
comes out of it is found by the fuzzer that runs them (fuzz.py), and stays here as a seed.
"""

import base64
import contextlib
import io
import json
import socket
import tarfile
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from reclaimnet import wire
from reclaimnet.adapters.kube import read
from reclaimnet.adapters.kube.read import UNREADABLE, inline_tune
from reclaimnet.adapters.linux.bpf_killswitch import NoSwitch
from reclaimnet.adapters.linux.slots import Turnstile
from reclaimnet.adapters.nats import access
from reclaimnet.adapters.nats.seals import Seal
from reclaimnet.adapters.nats.witness import Witness
from reclaimnet.adapters.slurm import words
from reclaimnet.adapters.tls import ca
from reclaimnet.adapters.vault.store import CHUNK_BYTES, Source, Vault, manifest_id, parse_manifest
from reclaimnet.adapters.vault.stream import HEADER, Stream
from reclaimnet.adapters.vault.transfer import ChunkServer
from reclaimnet.apps import bundle, calendar, chain_job, gateway, guard, guard_config, replay
from reclaimnet.apps import testbed as beds
from reclaimnet.apps.gateway_desk import Submission
from reclaimnet.apps.login import read_login
from reclaimnet.apps.register import read_invitation
from reclaimnet.errors import ReclaimNetError
from reclaimnet.model.market import Card, JobId, NodeId
from reclaimnet.model.talk import parse_talk
from reclaimnet.model.units import parse_duration, parse_size
from reclaimnet.model.work import JobRecord, JobSpec, Saving
from reclaimnet.policy.topology import parse_topology
from reclaimnet.sim.slurm.trace import parse_trace
from reclaimnet.sim.toml import read_scenario

STRANGER: Final = 54_321
"""A uid that has no processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    name: str
    enter: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    refusals: tuple[type[Exception], ...] = (ReclaimNetError,)
    """What else may come out of it, where whoever calls it expects that."""

    def try_(self, data: bytes) -> None:
        with contextlib.suppress(*self.refusals):
            self.enter(data)


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _each(*parsers: Callable[[Any], object]) -> Callable[[Any], None]:
    def enter(data: Any) -> None:
        for parse in parsers:
            with contextlib.suppress(ReclaimNetError):
                parse(data)

    return enter


# --- between nodes ---------------------------------------------------------------------------

RECORD: Final = wire.encode_record(
    JobRecord(
        id=JobId("j1"),
        spec=JobSpec(name="train", user="u", command=("python", "x.py"), gpus=1),
        submitted_at=1,
    )
)
CARD: Final = wire.encode_card(Card(node=NodeId("n1"), beat=1, gpus=(), vacant=()))
TOLD: Final = b'{"kind":"VacancyTold","node":"n1","vacant":1,"at":5}'
ASKED: Final = b'{"kind":"ReclaimRequest","gpus":["0"],"grace":5,"reason":"x"}'
MANIFEST: Final = json.dumps(
    {
        "job": "j1",
        "epoch": 1,
        "step": 7,
        "taken_at": 5,
        "saving": "sdk",
        "chunk_bytes": CHUNK_BYTES,
        "parts": [{"name": "state", "size": 3, "mode": 420, "chunks": ["ab" * 32]}],
    }
).encode()


def _manifest(data: bytes) -> None:
    parse_manifest(data, manifest_id(data))


class _Heard(Stream):
    """A connection on which a peer has said all that it will ever say."""

    def __init__(self, said: bytes) -> None:
        self._said = io.BytesIO(said)
        self.stall_s = 1.0
        self.sending_s = 0.0

    peer = "node:n1"  # type: ignore[assignment]
    connection = socket.socket()

    def receive_into(self, view: memoryview) -> None:
        if self._said.readinto(view) < len(view):
            raise ConnectionError("that was all")

    def hold_to(self, pace: object) -> None:
        pass

    def send(self, kind: int, payload: bytes | memoryview = b"") -> None:
        pass


@contextlib.contextmanager
def chunk_server(folder: Path) -> Iterator[tuple[ChunkServer, tuple[bytes, ...]]]:
    """One that has a checkpoint, and what a peer says to it that knows how."""
    (folder / "state").write_bytes(b"x" * 1000)
    with Vault(folder / "vault", quota_bytes=1 << 24) as vault:
        saved = vault.save(
            JobId("j1"),
            epoch=1,
            step=1,
            taken_at=1,
            saving=Saving.SDK,
            parts=[Source(name="state", path=folder / "state")],
        )
        server = ChunkServer(vault, None, host="127.0.0.1", may_read=lambda *_: True)  # type: ignore[arg-type]
        yield server, (_opening("j1", saved.manifest), _opening("j1", "../../etc/passwd"))


def _opening(job: str, manifest: str) -> bytes:
    said = json.dumps({"job": job, "manifest": manifest, "send": True, "base": None}).encode()
    want = HEADER.pack(2, 5) + bytes(5)
    return HEADER.pack(1, len(said)) + said + want


# --- on one machine --------------------------------------------------------------------------

GUARD: Final = tuple(
    json.dumps(request).encode()
    for request in (
        {"verb": "open", "guest": "j1.1", "pids": [2], "deadline": 5},
        {"verb": "deadline", "guest": "j1.1", "at": 5},
        {"verb": "renew", "guests": {"j1.1": 5}},
        {"verb": "stop", "guest": "j1.1"},
        {"verb": "pace", "transfer": "t", "rate": 5},
        {"verb": "mark", "transfer": "t"},
        {"verb": "slots", "guest": "j1.1", "anchor": 5, "period": 9, "slots": [[1, 2]]},
        {"verb": "listen", "port": 0},
        {"verb": "counts"},
        {"verb": "status"},
        {"verb": "terms", "guests": 1, "rate": 5, "until": 5},
        {"verb": "resume"},
    )
)


def _guard(folder: Path) -> Callable[[bytes], object]:
    """A guard without a kernel to act on, asked by somebody who owns nothing here."""
    made = object.__new__(guard.Guard)
    made.config = guard_config.GuardConfig(agent_uid=STRANGER, state=folder, socket=folder / "s")
    made.terms = made.config.terms
    made.guests, made.transfers, made.gone = {}, {}, deque()
    made.lane_deadline, made.halted, made.ended = guard.NEVER, False, deque()
    made.switch = NoSwitch()
    made._shaper, made._boot = None, "this one"
    made._turnstile = Turnstile("eth0", netns=None)
    made._cgroups = folder / "cgroup"
    made._cgroups.mkdir(exist_ok=True)

    def enter(data: bytes) -> None:
        for uid in (STRANGER, STRANGER + 1):
            answer = made.handle(guard.Call(request=guard._request(data), uid=uid))
            assert answer["ok"] or len(answer["error"]) > 10

    return enter


REQUEST: Final = b"""\
-----BEGIN CERTIFICATE REQUEST-----
MIHMMHQCAQAwEjEQMA4GA1UEAwwHbm9kZTpuMTBZMBMGByqGSM49AgEGCCqGSM49
AwEHA0IABJ1wIkU9+C9G4jPq6fdKv1N3i/ZVfXAeFfuaBqrBya5PIXPUhUBY9u80
ISYYI2XbAjYZgawVXMmrNurjS0UypQugADAKBggqhkjOPQQDAgNIADBFAiEA4ZJe
w+JFxTZdkDqvP5yoOEpIolfJhWR6vu21eUqHeUkCIDcTxCG1PPGXJeZiuFIVOVkp
IR+OBYa3XuRICiGRhYHQ
-----END CERTIFICATE REQUEST-----
"""
"""Of a key that is nobody's any more."""


def _on_another_curve(request: bytes) -> bytes:
    """The same with a curve that nobody knows, where the fuzzer found another error than ours."""
    head, *lines, foot = request.splitlines()
    known = bytes.fromhex("06082a8648ce3d030107")
    der = base64.b64decode(b"".join(lines)).replace(known, known[:-1] + b"\x6f")
    return b"\n".join([head, base64.encodebytes(der).strip(), foot, b""])


# --- files and HTTP --------------------------------------------------------------------------


def _tar() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        entry = tarfile.TarInfo("a/b.py")
        entry.size = 3
        tar.addfile(entry, io.BytesIO(b"1+1"))
    return made.getvalue()


def _bundle(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(ReclaimNetError):
            bundle.unpack(data, Path(folder) / "in" / "bundle")
        outside = [path for path in Path(folder).iterdir() if path.name != "in"]
        assert not outside, "nothing is written outside"


def _body(kind: type) -> Callable[[bytes], object]:
    return lambda data: msgspec.json.decode(data, type=kind)


def _trace(data: bytes) -> None:
    parse_trace(_text(data).splitlines(), name="f")


def _journal(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "journal"
        file.write_bytes(data)
        replay.record("f", replay.read_journal(file))


SCENARIO: Final = b"""
name = "s"
days = 1
[buildings.b]
uplink = "1gbit"
[[nodes]]
id = "n1"
gpus = 2
uplink = "1gbit"
building = "b"
[[happenings]]
at = "0s"
node = "n1"
kind = "lend"
[[jobs]]
id = "j"
at = "1m"
gpus = 1
hours = 1
state = "1gb"
"""
TOPOLOGY: Final = b"""
[core]
rate = "10gbit"
[buildings.b]
uplink = "1gbit"
[nodes.n1]
building = "b"
uplink = "1gbit"
nat = true
"""
BED: Final = b"""
mark = "m"
network = "10.9.0.0/16"
[[rack]]
name = "a"
hosts = 2
uplink = "1gbit"
"""
_ROW: Final = words.SEPARATOR.join(["1"] * max(len(words.SQUEUE_FIELDS), len(words.SACCT_FIELDS)))


POD: Final = (
    b'{"metadata":{"namespace":"n","name":"p","uid":"u","deletionTimestamp":"2026-01-01T00:00:00Z",'
    b'"annotations":{"x":"y"}},"spec":{"priority":1},"status":{"conditions":[{"type":"Ready"}]}}'
)
LINK: Final = (
    b'{"metadata":{"namespace":"n","name":"l","generation":1},"spec":{"rate":"1G","period":"1s",'
    b'"backgroundPercent":5,"bursts":[{"length":"60ms","rate":"1G","start":"1ms"}]}}'
)


def doors(folder: Path) -> Iterator[Door]:
    """All of them; the folder is theirs while they are used."""
    yield Door(
        name="wire",
        enter=_each(
            wire.decode_event,
            lambda data: wire.decode_told(data, "n1"),
            wire.decode_request,
            wire.decode_reply,
            wire.decode_record,
            wire.decode_card,
        ),
        seeds=(RECORD, CARD, TOLD, ASKED),
    )
    yield Door(name="manifest", enter=_manifest, seeds=(MANIFEST,))
    yield Door(
        name="subject",
        enter=lambda data: access.token(access.untoken(_text(data))),
        seeds=(b"lab1=2Ecs", b"=", b"=FF=00"),
    )
    yield Door(name="guard", enter=_guard(folder), seeds=GUARD)
    yield Door(
        name="slurm",
        enter=lambda data: _each(words.parse_squeue, words.parse_sacct, words.parse_sinfo)(
            _text(data)
        ),
        seeds=(_ROW.encode(),),
    )
    yield Door(
        name="trace",
        enter=_trace,
        seeds=(
            b"JobID|User|Submit|Start|End|State|TimelimitRaw|NNodes|Partition\n"
            b"1|u|2024-01-01T00:00:00|2024-01-01T00:00:00|2024-01-01T01:00:00|COMPLETED|60|1|p\n",
            b"; SWF\n1 0 1 60 1 -1 -1 1 60 -1 1 1 1 -1 1 -1 -1 -1\n",
        ),
    )
    yield Door(
        name="toml",
        enter=lambda data: _each(
            lambda text: read_scenario(text, file="f"), lambda text: parse_topology(text, file="f")
        )(_text(data)),
        seeds=(SCENARIO, TOPOLOGY),
    )
    yield Door(name="files", enter=_files(folder), seeds=(BED, b'agent_uid = 1\nlease = "1s"\n'))
    yield Door(
        name="words",
        enter=lambda data: _each(read_invitation, read_login, chain_job.parse_slurm_time)(
            _text(data)
        ),
        seeds=(
            b"rn1.eyJ1cmwiOiJ4IiwiY2EiOiJ4Iiwic2VjcmV0IjoieCJ9",
            b"rnl1.eyJ1cmwiOiJ4IiwidG9rZW4iOiJ4In0",
            b"1-02:03:04",
        ),
    )
    yield Door(name="mark", enter=_mark(folder), seeds=(b"n1 1 n1 - AAAA", b"_gateway 1 - - AAAA"))
    yield Door(
        name="kube",
        enter=_kube,
        seeds=(POD, LINK, b'{"metadata":{"annotations":{"x":"1s: 80ms@400M+100ms, 50ms@1G"}}}'),
        refusals=(*UNREADABLE, ReclaimNetError),
    )
    yield Door(
        name="units",
        enter=lambda data: _spelled(_text(data)),
        seeds=(
            *(b"60s", b"1h30m", b"2G", b"mon-fri 09:00-17:00", b"2026-11-20 08:00/12:00"),
            *(b"336ms/131ms@200M", b"1s: 80ms@400M+100ms, 50ms@1G+800ms"),
        ),
    )
    yield Door(
        name="certificate",
        enter=ca.requested_name,
        seeds=(REQUEST, _on_another_curve(REQUEST)),
    )
    yield Door(name="bundle", enter=_bundle, seeds=(_tar(),))
    yield Door(
        name="journal", enter=_journal, seeds=(b'{"at":5,"node":"n1","event":{"kind":"Woke"}}',)
    )
    yield Door(
        name="http",
        enter=lambda data: [
            _spared(_body(kind), data)
            for kind in (Submission, gateway.LendBody, gateway.ReclaimBody)
        ],
        seeds=(b'{"command":["x"],"gpus":1,"env":{"A":"b"}}', b'{"gpus":1,"hours":[]}'),
    )


def _spared(parse: Callable[[bytes], object], data: bytes) -> None:
    """The gateway answers 400 to these."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        parse(data)


def _spelled(text: str) -> None:
    """Whoever types it is told what is wrong with it, by a ValueError."""
    for parse in (
        *(parse_duration, parse_size, parse_talk, inline_tune),
        *(calendar.parse_hours, calendar.parse_maintenance),
    ):
        with contextlib.suppress(ValueError):
            parse(text)


def _mark(folder: Path) -> Callable[[bytes], object]:
    """Who is said to have written a version of a record, in a header that any node can write."""
    authority = ca.make_ca(folder / "ca")
    node = access.new_key(NodeId("n1"))
    witness = Witness(NodeId("n2"), key=node, seal=Seal(authority.pem.decode()))
    witness.hear(Card(node=node.name, key=node.public), 1)
    record = wire.decode_record(RECORD)

    def enter(data: bytes) -> None:
        version = witness.opened(record, RECORD, _text(data), stored_at=time.time_ns())
        # Nobody but the node and the campus has the keys.
        assert witness.doubt(version, follows=True) is not None
        # The key itself comes from the outside, too.
        witness.meet(Card(node=NodeId("n3"), key=_text(data)))
        access.has_signed(_text(data), b"x", _text(data))

    return enter


def _kube(data: bytes) -> None:
    item = wire.decode_json(data, dict[str, Any])
    for parse in (read.pod_of, read.node_of, read.link_of, read.named_tune_of):
        with contextlib.suppress(*UNREADABLE):
            parse(item)


def _files(folder: Path) -> Callable[[bytes], None]:
    file = folder / "file.toml"

    def enter(data: bytes) -> None:
        file.write_bytes(data)
        file.chmod(0o600)
        _each(guard_config.read_config, beds.read_config)(file)

    return enter


def of_chunks(server: ChunkServer, seeds: tuple[bytes, ...]) -> Door:
    return Door(
        name="chunks",
        enter=lambda data: server._answer(_Heard(data)),
        seeds=seeds,
        # As ChunkServer._serve: a peer that breaks the rules ends its connection.
        refusals=(OSError, ReclaimNetError),
    )
