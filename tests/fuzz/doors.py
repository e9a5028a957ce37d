"""The doors of ReclaimNet: each parser that faces the outside, as a function of bytes.

A door either understands what it is given or refuses it with one of our own errors. Whatever else
comes out of it is found by the fuzzer that runs them (fuzz.py), and stays here as a seed.
"""

import base64
import contextlib
import gzip
import io
import json
import os
import socket
import tarfile
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import numpy

from reclaimnet import wire
from reclaimnet.adapters.kube import read
from reclaimnet.adapters.kube.read import UNREADABLE, inline_tune
from reclaimnet.adapters.linux import criu, sandbox
from reclaimnet.adapters.linux.attempts import watch
from reclaimnet.adapters.linux.attempts.attempt import Attempt
from reclaimnet.adapters.linux.attempts.reports import RunnerReport
from reclaimnet.adapters.linux.bpf_killswitch import NoSwitch
from reclaimnet.adapters.linux.page import GUEST_PAGE, guest_page, make_page
from reclaimnet.adapters.linux.slots import Turnstile
from reclaimnet.adapters.nats import access
from reclaimnet.adapters.nats.seals import Seal
from reclaimnet.adapters.nats.witness import Witness
from reclaimnet.adapters.slurm import words
from reclaimnet.adapters.tls import ca
from reclaimnet.adapters.vault.manifests import CHUNK_BYTES, manifest_id, parse_manifest
from reclaimnet.adapters.vault.serving import ChunkServer
from reclaimnet.adapters.vault.store import Source, Vault
from reclaimnet.adapters.vault.stream import HEADER, Stream
from reclaimnet.apps import (
    backup,
    bundle,
    calendar,
    chain_job,
    gateway,
    guard,
    guard_config,
    kube_extender,
    replay,
)
from reclaimnet.apps import testbed as beds
from reclaimnet.apps.gateway_desk import Submission
from reclaimnet.apps.login import read_login
from reclaimnet.apps.register import read_invitation
from reclaimnet.errors import ReclaimNetError
from reclaimnet.model.hours import parse_hours
from reclaimnet.model.market import Card, JobId, NodeId
from reclaimnet.model.page import PAGE_BYTES
from reclaimnet.model.talk import parse_talk
from reclaimnet.model.units import DAY, parse_duration, parse_size
from reclaimnet.model.work import JobRecord, JobSpec, Saving
from reclaimnet.policy.topology import parse_topology
from reclaimnet.sdk import image
from reclaimnet.sdk.job import _Link, _RotationFile
from reclaimnet.sim import traces
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


P256: Final = bytes.fromhex("06082a8648ce3d030107")
VERSION: Final = bytes.fromhex("020100")


def _with(request: bytes, before: bytes, after: bytes) -> bytes:
    """The same with other bytes inside."""
    head, *lines, foot = request.splitlines()
    der = base64.b64decode(b"".join(lines)).replace(before, after, 1)
    return b"\n".join([head, base64.encodebytes(der).strip(), foot, b""])


# --- files and HTTP --------------------------------------------------------------------------


def _tar() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        entry = tarfile.TarInfo("a/b.py")
        entry.size = 3
        tar.addfile(entry, io.BytesIO(b"1+1"))
    return made.getvalue()


@contextlib.contextmanager
def _inside() -> Iterator[Path]:
    """Nothing may be written outside of this folder."""
    with tempfile.TemporaryDirectory() as folder:
        inside = Path(folder) / "in"
        inside.mkdir()
        yield inside
        assert os.listdir(folder) == ["in"], "nothing is written outside"


def _archives(data: bytes) -> None:
    """What a job is shipped in, what it leaves, and what a campus is saved in."""
    with _inside() as inside:
        with contextlib.suppress(ReclaimNetError):
            bundle.unpack(data, inside / "bundle")
        with contextlib.suppress(ReclaimNetError):
            bundle.unpack_output(iter([data[:100], data[100:]]), inside / "output")
        (inside / "file").write_bytes(data)
        with contextlib.suppress(ReclaimNetError):
            backup.restore(SimpleNamespace(state=inside / "state"), inside / "file")  # type: ignore[arg-type]


def _saved_campus() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        place = SimpleNamespace(state=Path(folder) / "state")
        place.state.mkdir()
        (place.state / "ca").mkdir()
        (place.state / "ca" / "ca.key").write_text("key")
        backup.backup(place, Path(folder) / "file")  # type: ignore[arg-type]
        return (Path(folder) / "file").read_bytes()


def _body(kind: type) -> Callable[[bytes], object]:
    return lambda data: msgspec.json.decode(data, type=kind)


# --- what a job writes, and what of it comes from another node -------------------------------


def _saved_state() -> bytes:
    """An image's header, but for its checksum: with that, any change would be noticed at once."""
    state = {"a": 1, "b": (2.5, None), "c": b"x" * 99, "d": numpy.zeros(3), 4: complex(1, 2)}
    with tempfile.TemporaryDirectory() as folder:
        packed = image.pack(state, image.Layout())
        image.write(packed, Path(folder), image.map_image(Path(folder), packed.size))
        return (Path(folder) / image.HEADER).read_bytes()[image._PREFIX.size :]


_KIND: Final = image._KIND.encode()


def _image(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prefix = image._PREFIX.pack(image.MAGIC, len(data), zlib.crc32(data))
        (Path(folder) / image.HEADER).write_bytes(prefix + data)
        (Path(folder) / image.IMAGE).write_bytes(bytes(4096))
        image.load(Path(folder))


def _saved_cell() -> bytes:
    """What CRIU does not save, as a line and an archive."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, kind in (("work/a", tarfile.REGTYPE), ("work/b", tarfile.LNKTYPE)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "work/a"
            tar.addfile(entry)
    return b'{"main":5,"log_bytes":3,"gone":["x"]}\n' + made.getvalue()


def _cell(data: bytes) -> None:
    with _inside() as inside:
        meta, _, files = data.partition(b"\n")
        (inside / criu.META).write_bytes(meta)
        (inside / criu.FILES).write_bytes(files)
        folders = {name: inside / name for name in ("work", "tmp", "shm")}
        for folder in folders.values():
            folder.mkdir()
        criu.unpack(inside, folders)


GUEST: Final = (
    bytes(PAGE_BYTES) + b"17",
    b"".join(word.to_bytes(8, "little") for word in range(PAGE_BYTES // 8)) + b"no room",
    b"\xff" * PAGE_BYTES + b'{"reason":"x","deadline":"2026-01-01","period":1,"anchor":2}',
)


def _guest(folder: Path) -> Callable[[bytes], object]:
    """The page of a job in a sandbox, as it likes, and a text in all files that are read of it."""
    page, place = folder / "page", folder / "guest"
    own = make_page(page)
    (place / "checkpoint").mkdir(parents=True)
    channel = object.__new__(_Link)
    channel._run_dir, channel.words = place, [1] * PAGE_BYTES  # type: ignore[assignment]

    def enter(data: bytes) -> None:
        page.with_name(GUEST_PAGE).write_bytes(data[:PAGE_BYTES])
        for name in (sandbox.SAVE_FAILED, "checkpoint/.saved", "log", "notice.json"):
            (place / name).write_bytes(data[PAGE_BYTES:])
        attempt = Attempt(
            job=JobId("j1"), epoch=1, saving=Saving.SDK, gpus=(), dir=place, images=place,
            output=place, group=None, memory=None, words=guest_page(own, page), main=1,
        )  # fmt: skip
        told: list[RunnerReport] = []
        watch.look(attempt, told.append, now=1)
        told.append(attempt.took(attempt.checkpoint, None, final=False))
        for report in told:
            assert msgspec.json.encode(getattr(report, "step", 0))
            snapshot = getattr(report, "path", place)
            assert snapshot.is_relative_to(place), "only its own files are read"
        channel.notice()
        _RotationFile(place / "notice.json")._read()

    return enter


def _trace(folder: Path) -> Callable[[bytes], None]:
    file = folder / "trace.csv"

    def enter(data: bytes) -> None:
        with contextlib.suppress(ReclaimNetError):
            parse_trace(_text(data).splitlines(), name="f")
        file.write_bytes(data)
        _each(
            lambda path: traces.spot(path, seed=1),
            lambda path: traces.philly(path, start=0, until=DAY, most_gpus=8, seed=1),
        )(file)

    return enter


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
        enter=_trace(folder),
        seeds=(
            b"0,add,a\n0,add,b\n60000,remove,a\n",
            ",".join(traces.PHILLY_COLUMNS).encode() + b"\n2017-10-01 00:00:00,90,1,90,x\n",
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
        # For a curve that nobody knows and for a later version, other errors than ours came out.
        seeds=(
            REQUEST,
            _with(REQUEST, P256, P256[:-1] + b"\x6f"),
            _with(REQUEST, VERSION, VERSION[:-1] + b"\x02"),
        ),
    )
    yield Door(
        name="archives", enter=_archives, seeds=(_tar(), gzip.decompress(_tar()), _saved_campus())
    )
    yield Door(
        name="image",
        enter=_image,
        # Too short a number came out as an error of its own.
        seeds=(_saved_state(), b'{"size":0,"tree":{"%s":"float","bits":"00"}}' % _KIND),
    )
    yield Door(name="cell", enter=_cell, seeds=(_saved_cell(),))
    yield Door(name="guest", enter=_guest(folder), seeds=GUEST)
    yield Door(
        name="journal", enter=_journal, seeds=(b'{"at":5,"node":"n1","event":{"kind":"Woke"}}',)
    )
    yield Door(
        name="http",
        enter=lambda data: [
            _spared(_body(kind), data)
            for kind in (
                *(Submission, gateway.LendBody, gateway.ReclaimBody),
                kube_extender.Arguments,
            )
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
        *(parse_hours, calendar.parse_maintenance),
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
