"""Chunks pulled over real TLS sockets: whole, resumed, repaired, refused."""

import fcntl
import json
import os
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from OpenSSL import SSL
from tests import plain_tls, vault_files

from reclaimnet import wire
from reclaimnet.adapters.tls import ca
from reclaimnet.adapters.vault import pulling
from reclaimnet.adapters.vault.assembly import Assembly
from reclaimnet.adapters.vault.manifests import CHUNK_BYTES
from reclaimnet.adapters.vault.pace import Pace
from reclaimnet.adapters.vault.pulling import pull
from reclaimnet.adapters.vault.serving import ChunkServer, MayRead
from reclaimnet.adapters.vault.store import Source, Vault
from reclaimnet.adapters.vault.stream import HEADER, Stream
from reclaimnet.errors import Damaged, Forbidden, NotFound, Unavailable, VaultFull
from reclaimnet.model.market import Address, JobId
from reclaimnet.model.units import GIB, MIB
from reclaimnet.model.work import ChunkId, ManifestId, Saving

JOB = JobId("job-1")
PATIENCE_S = 90.0


class Campus:
    """A certificate authority, vaults, and servers on loopback."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self.authority = ca.make_ca(folder / "ca")

    def credentials(self, node: str, authority: ca.Authority | None = None) -> ca.Credentials:
        authority = authority or self.authority
        key = ca.new_key()
        request = ca.request_certificate(key, f"node:{node}")
        certificate = ca.issue(authority, f"node:{node}", request, ["127.0.0.1"])
        return ca.keep(
            self.folder / f"node-{node}", certificate=certificate, key=key, authority=authority.pem
        )

    def client(self, node: str = "puller") -> SSL.Context:
        return ca.client_context(self.credentials(node))

    def vault(self, name: str, quota_bytes: int = GIB) -> Vault:
        return self._stack.enter_context(Vault(self.folder / name, quota_bytes=quota_bytes))

    def serve(
        self,
        vault: Vault,
        *,
        may_read: MayRead = lambda peer, job: True,
        objection: Callable[[str], str] = lambda peer: "",
        pace: Pace | None = None,
        max_connections: int = 8,
    ) -> ChunkServer:
        return self._stack.enter_context(
            ChunkServer(
                vault,
                ca.server_context(self.credentials("server")),
                may_read=may_read,
                objection=objection,
                pace=pace,
                max_connections=max_connections,
            )
        )

    def image(self, *, chunks: int, seed: int = 0) -> Path:
        path = self.folder / "image"
        path.write_bytes(np.random.default_rng(seed).bytes(chunks * CHUNK_BYTES) + b"tail")
        return path


@pytest.fixture
def campus(tmp_path: Path) -> Iterator[Campus]:
    with ExitStack() as stack:
        yield Campus(tmp_path, stack)


def save(vault: Vault, path: Path, *, step: int = 1, job: JobId = JOB) -> ManifestId:
    return vault.save(
        job,
        epoch=1,
        step=step,
        saving=Saving.SDK,
        taken_at=step,
        parts=[Source(name="state", path=path)],
    ).manifest


def same(vault: Vault, manifest: ManifestId, path: Path, folder: Path) -> bool:
    vault.assemble(manifest, folder)
    return (folder / "state").read_bytes() == path.read_bytes()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.005)


class Meddler:
    """Stands between puller and server, and breaks connections after so many bytes."""

    def __init__(self, target: Address, *, break_after: list[int]) -> None:
        self._target = target
        self._budgets = break_after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address(host="127.0.0.1", port=self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            budget = self._budgets.pop(0) if self._budgets else 1 << 40
            thread = threading.Thread(target=self._relay, args=(near, budget))
            thread.start()
            self._threads.append(thread)

    def _relay(self, near: socket.socket, budget: int) -> None:
        far = socket.create_connection((self._target.host, self._target.port))
        with near, far:
            back = threading.Thread(target=self._copy, args=(near, far, 1 << 40))
            back.start()
            self._copy(far, near, budget)
            back.join()

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket, limit: int) -> None:
        with suppress(OSError):
            while limit > 0 and (data := source.recv(65536)):
                sink.sendall(data[:limit])
                limit -= len(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def meddling(target: Address, *, break_after: list[int]) -> Iterator[Address]:
    meddler = Meddler(target, break_after=break_after)
    try:
        yield meddler.address
    finally:
        meddler.close()


def test_what_is_pulled_is_what_was_saved(campus: Campus) -> None:
    source, target = campus.vault("source"), campus.vault("target")
    path = campus.image(chunks=20)
    manifest = save(source, path)
    server = campus.serve(source)
    told: list[tuple[int, int]] = []
    result = pull(
        target,
        manifest=manifest,
        job=JOB,
        sources=[server.address],
        context=campus.client(),
        connections=3,
        on_progress=lambda here, total: told.append((here, total)),
    )
    size = path.stat().st_size
    assert result.moved_bytes == size
    assert told[-1] == (size, size)
    assert target.manifests(JOB) == [manifest]
    assert same(target, manifest, path, campus.folder / "out")


def test_a_save_that_was_written_over_in_memory_is_pulled_from_the_disk(campus: Campus) -> None:
    source, target = campus.vault("source"), campus.vault("target")
    path = campus.image(chunks=6)
    parts = [Source(name="state", path=path, in_memory=True)]
    manifest = source.save(
        JOB, epoch=1, step=1, saving=Saving.SDK, taken_at=1, parts=parts
    ).manifest
    saved = campus.folder / "saved"
    shutil.copyfile(path, saved)
    with path.open("r+b") as file:
        file.seek(2 * CHUNK_BYTES)
        file.write(b"the job has saved again")
    server = campus.serve(source)
    pull(target, manifest=manifest, job=JOB, sources=[server.address], context=campus.client())
    assert same(target, manifest, saved, campus.folder / "out")


def test_what_goes_wrong_while_storing_is_told_to_who_pulls(
    campus: Campus, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = campus.vault("source"), campus.vault("target")
    manifest = save(source, campus.image(chunks=6))

    def put(*_: object, **__: object) -> bool:
        raise RuntimeError("a bug")

    monkeypatch.setattr(target, "put", put)
    server = campus.serve(source)
    with pytest.raises(RuntimeError, match="a bug"):
        pull(target, manifest=manifest, job=JOB, sources=[server.address], context=campus.client())
    wait_until(lambda: server.connections == 0)


def test_a_second_pull_moves_only_what_changed(campus: Campus) -> None:
    source, target = campus.vault("source"), campus.vault("target")
    server, context = campus.serve(source), campus.client()
    path = campus.image(chunks=8)
    for step in (1, 2):
        manifest = save(source, path, step=step)
        result = pull(target, manifest=manifest, job=JOB, sources=[server.address], context=context)
        with path.open("r+b") as file:
            file.seek(3 * CHUNK_BYTES)
            file.write(b"new")
    assert result.moved_bytes == CHUNK_BYTES
    again = pull(target, manifest=manifest, job=JOB, sources=[], context=context)
    assert again.moved_bytes == 0


def test_a_broken_connection_is_resumed(campus: Campus) -> None:
    source, target = campus.vault("source"), campus.vault("target")
    path = campus.image(chunks=24)
    manifest = save(source, path)
    server = campus.serve(source)
    breaks = [5 * MIB + 77, 4 * MIB, 100, 6 * MIB]
    with meddling(server.address, break_after=breaks) as address:
        result = pull(
            target, manifest=manifest, job=JOB, sources=[address], context=campus.client()
        )
    assert breaks == []
    assert result.moved_bytes == path.stat().st_size
    assert same(target, manifest, path, campus.folder / "out")


def test_the_next_source_is_tried(campus: Campus) -> None:
    source, target = campus.vault("source"), campus.vault("target")
    empty = campus.serve(campus.vault("empty"))
    manifest = save(source, campus.image(chunks=3))
    server = campus.serve(source)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nobody = Address(host="127.0.0.1", port=unused.getsockname()[1])
    result = pull(
        target,
        manifest=manifest,
        job=JOB,
        sources=[nobody, empty.address, server.address],
        context=campus.client(),
    )
    assert target.manifests(JOB) == [manifest]
    assert result.moved_bytes == result.manifest.size


def test_a_source_that_died_unheard_costs_only_an_answers_time(
    campus: Campus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel still takes connections, and nobody answers on them."""
    monkeypatch.setattr(pulling, "HANDSHAKE_S", 1.0)
    source, target = campus.vault("source"), campus.vault("target")
    manifest = save(source, campus.image(chunks=3))
    server = campus.serve(source)
    stop = threading.Event()
    too_long = threading.Timer(PATIENCE_S, stop.set)
    with socket.create_server(("127.0.0.1", 0)) as dead:
        too_long.start()
        try:
            result = pull(
                target,
                manifest=manifest,
                job=JOB,
                sources=[Address(host="127.0.0.1", port=dead.getsockname()[1]), server.address],
                context=campus.client(),
                stop=stop,
            )
        finally:
            too_long.cancel()
    assert result.moved_bytes


def test_each_source_gives_what_it_has(campus: Campus) -> None:
    """Both have lost a different chunk since they saved; together they have all."""
    path = campus.image(chunks=6)
    sources = [campus.vault("one"), campus.vault("two")]
    for number, source in enumerate(sources):
        manifest = save(source, path)
        lost = source.manifest(manifest).parts[0].chunks[number]
        vault_files.rot(source.root, lost)
        with pytest.raises(Damaged):
            source.read(lost)
    target = campus.vault("target")
    pull(
        target,
        manifest=manifest,
        job=JOB,
        sources=[campus.serve(source).address for source in sources],
        context=campus.client(),
    )
    assert same(target, manifest, path, campus.folder / "out")


def rot(vault: Vault, manifest: ManifestId, index: int) -> ChunkId:
    chunk = vault.manifest(manifest).parts[0].chunks[index]
    vault_files.rot(vault.root, chunk)
    return chunk


def test_a_chunk_damaged_at_the_source_is_had_from_another(campus: Campus) -> None:
    path = campus.image(chunks=4)
    bad, good, target = campus.vault("bad"), campus.vault("good"), campus.vault("target")
    manifest = save(bad, path)
    assert save(good, path) == manifest
    rotten = rot(bad, manifest, 2)
    sources = [campus.serve(bad).address, campus.serve(good).address]
    pull(
        target,
        manifest=manifest,
        job=JOB,
        sources=sources,
        context=campus.client(),
        connections=1,
    )
    assert same(target, manifest, path, campus.folder / "out")
    # The source was told to look, and has set it aside.
    assert bad.missing(bad.manifest(manifest)) == [rotten]


def test_a_chunk_damaged_at_the_only_source_is_refused(campus: Campus) -> None:
    source, target = campus.vault("source"), campus.vault("target")
    manifest = save(source, campus.image(chunks=4))
    rot(source, manifest, 1)
    server, context = campus.serve(source), campus.client()
    with pytest.raises((NotFound, Unavailable, Damaged)):
        pull(target, manifest=manifest, job=JOB, sources=[server.address], context=context)
    assert target.manifests(JOB) == []


def test_a_chunk_damaged_here_is_pulled_again(campus: Campus) -> None:
    source, target = campus.vault("source"), campus.vault("target")
    path = campus.image(chunks=4)
    manifest = save(source, path)
    server, context = campus.serve(source), campus.client()
    order = {"manifest": manifest, "job": JOB, "sources": [server.address], "context": context}
    pull(target, **order)
    rot(target, manifest, 2)
    with pytest.raises(Damaged):
        target.assemble(manifest, campus.folder / "out")
    assert pull(target, **order).moved_bytes == CHUNK_BYTES
    assert same(target, manifest, path, campus.folder / "out")


PULLER = """
import sys, json, threading
from pathlib import Path
from reclaimnet.adapters.tls import ca
from reclaimnet.adapters.vault.assembly import Assembly
from reclaimnet.adapters.vault.pace import Pace
from reclaimnet.adapters.vault.store import Vault
from reclaimnet.adapters.vault.pulling import pull
from reclaimnet.model.market import Address
o = json.loads(sys.argv[1])
folder = Path(o["credentials"])
kept = ca.Credentials(
    certificate=folder / "node.crt", key=folder / "node.key", authority=folder / "ca.crt"
)
pull(
    Vault(Path(o["vault"]), quota_bytes=1 << 30),
    manifest=o["manifest"], job=o["job"],
    sources=[Address(host="127.0.0.1", port=o["port"])],
    context=ca.client_context(kept),
    pace=Pace(6 << 20),
)
"""


def test_a_killed_pull_goes_on_where_it_was(campus: Campus) -> None:
    source = campus.vault("source")
    path = campus.image(chunks=32)
    manifest = save(source, path)
    server = campus.serve(source)
    root = campus.folder / "target"
    credentials = campus.credentials("killed")
    order = {
        "credentials": str(credentials.key.parent),
        "vault": str(root),
        "manifest": manifest,
        "job": JOB,
        "port": server.address.port,
    }
    process = subprocess.Popen(
        [sys.executable, "-c", PULLER, json.dumps(order)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        wait_until(lambda: len(vault_files.named(root)) >= 5 or process.poll() is not None)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    target = campus.vault("target")
    assert target.manifests(JOB) == []
    target.collect()
    left = len(target.missing(source.manifest(manifest)))
    assert 0 < left <= 33 - 4, "it was killed in the middle"
    result = pull(
        target, manifest=manifest, job=JOB, sources=[server.address], context=campus.client()
    )
    assert (left - 1) * CHUNK_BYTES < result.moved_bytes <= left * CHUNK_BYTES
    assert same(target, manifest, path, campus.folder / "out")


def test_a_stop_ends_it_and_what_came_stays(campus: Campus) -> None:
    source, target = campus.vault("source"), campus.vault("target")
    path = campus.image(chunks=24)
    manifest = save(source, path)
    server, context, stop = campus.serve(source), campus.client(), threading.Event()
    caught: list[Exception] = []

    def run() -> None:
        try:
            pull(
                target,
                manifest=manifest,
                job=JOB,
                sources=[server.address],
                context=context,
                stop=stop,
                pace=Pace(4 * MIB),
            )
        except Unavailable as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: target.usage().chunks >= 2)
    stop.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert "was stopped" in str(caught[0])
    here = target.usage().chunks
    assert 2 <= here < 25
    result = pull(target, manifest=manifest, job=JOB, sources=[server.address], context=context)
    assert result.moved_bytes <= path.stat().st_size - (here - 1) * CHUNK_BYTES


def test_a_pace_can_be_lifted_while_it_runs(campus: Campus) -> None:
    source, target = campus.vault("source"), campus.vault("target")
    manifest = save(source, campus.image(chunks=16))
    server, context = campus.serve(source), campus.client()
    # At this pace it would take until tomorrow.
    pace = Pace(100)
    thread = threading.Thread(
        target=pull,
        args=(target,),
        kwargs={
            "manifest": manifest,
            "job": JOB,
            "sources": [server.address],
            "context": context,
            "pace": pace,
        },
    )
    thread.start()
    assert target.usage().chunks == 0
    pace.change(None)
    thread.join(PATIENCE_S)
    assert target.manifests(JOB) == [manifest]


def test_another_campus_is_refused(campus: Campus) -> None:
    source, target = campus.vault("source"), campus.vault("target")
    manifest = save(source, campus.image(chunks=1))
    server = campus.serve(source)
    stranger = ca.make_ca(campus.folder / "other-ca")
    own = ca.client_context(campus.credentials("stranger", stranger))
    with pytest.raises(Forbidden, match="certif"):
        pull(target, manifest=manifest, job=JOB, sources=[server.address], context=own)
    # Even one that believes us is not believed.
    for certified in (True, False):
        trusting = SSL.Context(SSL.TLS_METHOD)
        if certified:
            folder = campus.folder / "node-stranger"
            trusting.use_certificate_file(str(folder / "node.crt"))
            trusting.use_privatekey_file(str(folder / "node.key"))
        with pytest.raises((Forbidden, Unavailable)):
            pull(target, manifest=manifest, job=JOB, sources=[server.address], context=trusting)
    assert target.usage().used_bytes == 0


def test_only_who_may_read_a_job_gets_its_chunks(campus: Campus) -> None:
    source, target = campus.vault("source"), campus.vault("target")
    path = campus.image(chunks=2)
    mine = save(source, path, job=JobId("mine"))
    theirs = save(source, path, job=JobId("theirs"))
    server = campus.serve(source, may_read=lambda peer, job: (peer, job) == ("node:friend", "mine"))
    friend, stranger = campus.client("friend"), campus.client("stranger")

    def attempt(manifest: ManifestId, job: str, context: SSL.Context) -> None:
        pull(target, manifest=manifest, job=JobId(job), sources=[server.address], context=context)

    with pytest.raises(Forbidden, match="may not read"):
        attempt(mine, "mine", stranger)
    with pytest.raises(Forbidden, match="may not read"):
        attempt(theirs, "theirs", friend)
    # To name a job that one may read does not open a checkpoint of another.
    with pytest.raises(NotFound):
        attempt(theirs, "mine", friend)
    assert target.usage().used_bytes == 0
    attempt(mine, "mine", friend)
    assert target.manifests(JobId("mine")) == [mine]


def test_what_was_begun_ends_when_the_source_may_not_go_on(campus: Campus) -> None:
    source, target = campus.vault("source"), campus.vault("target")
    path = campus.image(chunks=6)
    manifest = save(source, path)
    # It opens the checkpoint, and gets two chunks of it.
    allowed = iter(("", "", ""))
    closing = campus.serve(source, objection=lambda peer: next(allowed, "its time is over"))
    context = campus.client()
    with pytest.raises((Unavailable, Forbidden), match=r"broke off|its time is over"):
        pull(target, manifest=manifest, job=JOB, sources=[closing.address], context=context)
    assert target.manifests(JOB) == []
    assert target.usage().chunks <= 2
    other = campus.serve(source)
    pull(target, manifest=manifest, job=JOB, sources=[other.address], context=context)
    assert same(target, manifest, path, campus.folder / "there")


def test_who_comes_too_late_is_told_so_and_not_that_it_may_not_read(campus: Campus) -> None:
    source, target = campus.vault("source"), campus.vault("target")
    manifest = save(source, campus.image(chunks=1))
    server = campus.serve(source, objection=lambda peer: "its owner's deadline has passed")
    with pytest.raises(Forbidden, match=r"from this machine now: its owner's deadline has passed"):
        pull(
            target,
            manifest=manifest,
            job=JOB,
            sources=[server.address],
            context=campus.client(),
        )


def test_no_room_is_said_before_anything_moves(campus: Campus) -> None:
    source, target = campus.vault("source"), campus.vault("target", quota_bytes=3 * MIB)
    manifest = save(source, campus.image(chunks=6))
    server, context = campus.serve(source), campus.client()
    with pytest.raises(VaultFull, match="raise its quota"):
        pull(target, manifest=manifest, job=JOB, sources=[server.address], context=context)
    assert target.usage().used_bytes == 0
    assert vault_files.is_empty(target)


def raw_connection(campus: Campus, server: ChunkServer) -> ssl.SSLSocket:
    connection = socket.create_connection(
        (server.address.host, server.address.port), timeout=PATIENCE_S
    )
    return plain_tls.context(campus.credentials("rude")).wrap_socket(connection)


@pytest.mark.parametrize(
    "rude",
    [
        HEADER.pack(1, 0xFFFFFFFF),
        HEADER.pack(2, 5) + struct.pack("!I?", 0, False),
        HEADER.pack(99, 0),
        HEADER.pack(1, 2) + b"[]",
        HEADER.pack(1, 4) + b"\xff\xff\xff\xff",
        b"",
    ],
    ids=["huge frame", "want before open", "unknown kind", "not an object", "not text", "nothing"],
)
def test_a_rude_peer_is_cut_off_and_others_are_served(campus: Campus, rude: bytes) -> None:
    source, target = campus.vault("source"), campus.vault("target")
    manifest = save(source, campus.image(chunks=1))
    server = campus.serve(source)
    with raw_connection(campus, server) as connection:
        connection.sendall(rude)
        if rude:
            assert connection.recv(1) == b""
    pull(target, manifest=manifest, job=JOB, sources=[server.address], context=campus.client())
    assert target.manifests(JOB) == [manifest]


def test_a_chunk_outside_the_checkpoint_cannot_be_asked_for(campus: Campus) -> None:
    source = campus.vault("source")
    manifest = save(source, campus.image(chunks=1))
    opening = {"job": JOB, "manifest": manifest, "base": None, "send": False}
    body = wire.encode_json(opening)
    with raw_connection(campus, campus.serve(source)) as connection:
        connection.sendall(HEADER.pack(1, len(body)) + body)
        assert connection.recv(HEADER.size) == HEADER.pack(16, 0)
        connection.sendall(HEADER.pack(2, 5) + struct.pack("!I?", 2, False))
        assert connection.recv(1) == b""


@contextmanager
def lying_server(campus: Campus, answer: bytes) -> Iterator[Address]:
    """Certified by the campus, but not what it should be."""
    context = plain_tls.context(campus.credentials("liar"), server=True)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
                with context.wrap_socket(connection, server_side=True) as tls:
                    tls.recv(4096)
                    tls.sendall(answer)
                    tls.recv(1)
            except OSError:
                if listener.fileno() == -1:
                    return

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Address(host="127.0.0.1", port=listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@pytest.mark.parametrize(
    "answer",
    [HEADER.pack(16, 0xFFFFFFFF), HEADER.pack(16, 2) + b"{}", HEADER.pack(17, 4) + b"data"],
    ids=["huge manifest", "another manifest", "chunk out of turn"],
)
def test_a_lying_server_is_refused(campus: Campus, answer: bytes) -> None:
    target = campus.vault("target")
    with lying_server(campus, answer) as address, pytest.raises(Damaged):
        pull(
            target,
            manifest=ManifestId("0" * 64),
            job=JOB,
            sources=[address],
            context=campus.client(),
        )
    assert target.usage().used_bytes == 0


def test_too_many_connections_are_turned_away(campus: Campus) -> None:
    source, target = campus.vault("source"), campus.vault("target")
    manifest = save(source, campus.image(chunks=1))
    server, context = campus.serve(source, max_connections=1), campus.client()
    order = {"manifest": manifest, "job": JOB, "sources": [server.address], "context": context}
    with raw_connection(campus, server), pytest.raises(Unavailable):
        pull(target, **order)
    wait_until(lambda: server.connections == 0)
    pull(target, **order)
    assert target.manifests(JOB) == [manifest]


def test_a_stopped_server_leaves_no_thread(campus: Campus) -> None:
    before = set(threading.enumerate())
    server = campus.serve(campus.vault("source"))
    with raw_connection(campus, server) as connection:
        wait_until(lambda: server.connections == 1)
        server.stop()
        assert connection.recv(1) == b""
    assert set(threading.enumerate()) <= before, "of others that were there, some may have ended"


def test_over_a_slow_link_small_changes_travel_as_deltas(campus: Campus) -> None:
    source, target = campus.vault("source"), campus.vault("target")
    server, context = campus.serve(source, pace=Pace(40 * MIB)), campus.client()
    rng = np.random.default_rng(1)
    state = rng.normal(0, 0.02, 24 * CHUNK_BYTES // 4).astype("f4")
    path = campus.folder / "state"
    moved = []
    for step in (1, 2):
        state.tofile(path)
        manifest = save(source, path, step=step)
        result = pull(target, manifest=manifest, job=JOB, sources=[server.address], context=context)
        moved.append(result.moved_bytes)
        state += rng.normal(0, 1e-6, state.size).astype("f4")
        if step == 1:
            first = path.read_bytes()
    assert moved[0] == len(first)
    assert moved[1] < 0.9 * moved[0]
    assert same(target, manifest, path, campus.folder / "out")


def test_a_delta_on_a_base_that_rotted_is_replaced_by_the_chunk(campus: Campus) -> None:
    source, target = campus.vault("source"), campus.vault("target")
    server, context = campus.serve(source, pace=Pace(40 * MIB)), campus.client()
    state = np.zeros(16 * CHUNK_BYTES // 4, "f4")
    state[:] = np.arange(state.size)
    path = campus.folder / "state"
    state.tofile(path)
    first = save(source, path)
    pull(target, manifest=first, job=JOB, sources=[server.address], context=context)
    for index in range(16):
        rot(target if index % 2 else source, first, index)
    (state + 1).astype("f4").tofile(path)
    second = save(source, path, step=2)
    pull(target, manifest=second, job=JOB, sources=[server.address], context=context)
    assert same(target, second, path, campus.folder / "out")


def test_an_assembly_is_brought_up_to_date_by_a_pull(campus: Campus) -> None:
    source, target = campus.vault("source"), campus.vault("target")
    server, context = campus.serve(source), campus.client()
    path = campus.image(chunks=24)
    first = save(source, path)
    assembly = Assembly(campus.folder / "laid-out")
    order = {"job": JOB, "sources": [server.address], "context": context}
    pull(target, manifest=first, assembly=assembly, **order)
    assert (assembly.into / "state").read_bytes() == path.read_bytes()
    with path.open("r+b") as file:
        file.seek(3 * CHUNK_BYTES)
        file.write(b"x" * (12 * CHUNK_BYTES))
        file.truncate(20 * CHUNK_BYTES + 7)
    second = save(source, path, step=2)
    pull(target, manifest=second, assembly=assembly, **order)
    assert assembly.holds == target.manifest(second)
    assert (assembly.into / "state").read_bytes() == path.read_bytes()
    pull(target, manifest=first, assembly=assembly, **order)
    assert assembly.holds == target.manifest(first), "also if nothing has to be moved"


def test_an_assembly_in_the_way_does_not_stop_a_pull(campus: Campus) -> None:
    source, target = campus.vault("source"), campus.vault("target")
    server, context = campus.serve(source), campus.client()
    path = campus.image(chunks=12)
    manifest = save(source, path)
    (campus.folder / "laid-out" / "state").mkdir(parents=True)
    assembly = Assembly(campus.folder / "laid-out")
    pull(
        target,
        manifest=manifest,
        job=JOB,
        sources=[server.address],
        context=context,
        assembly=assembly,
    )
    assert assembly.holds is None
    assert same(target, manifest, path, campus.folder / "out")


def test_what_a_slow_peer_has_sent_is_taken_before_the_rest_comes(campus: Campus) -> None:
    """Who waits for much is not woken for little; but what stays little is taken all the same, or a
    slow link would look like a peer that does not move."""
    frame = np.random.default_rng(3).bytes(MIB)
    plain: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as others:
        accepting = others.submit(listener.accept)
        plain.append(socket.create_connection(listener.getsockname()))
        plain.append(accepting.result()[0])
        ends = [
            Stream(connection, context, server_side=server_side, stopped=lambda: False, pace=Pace())
            for connection, context, server_side in (
                (plain[0], campus.client(), False),
                (plain[1], ca.server_context(campus.credentials("server")), True),
            )
        ]
        with closing(ends[0]) as puller, closing(ends[1]) as server:
            greeting = others.submit(server.handshake)
            puller.handshake()
            greeting.result()
            into = bytearray(MIB)
            receiving = others.submit(puller.receive_into, memoryview(into))
            for part in (frame[:1000], frame[1000:9000], frame[9000:]):
                server.send_small(1, [part[HEADER.size :]])
                wait_until(lambda: not unread(puller.connection))
            receiving.result()
    # The receiver was told of no frames: their headers are part of what came.
    for begin, end in ((0, 1000), (1000, 9000), (9000, MIB)):
        assert into[begin + HEADER.size : end] == frame[begin + HEADER.size : end]


def unread(connection: socket.socket) -> int:
    """Bytes that have come and that nobody has taken yet."""
    return int(struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))[0])
