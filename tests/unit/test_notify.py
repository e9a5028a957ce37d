"""Telling people: what is worth a message, that it arrives, and that nothing leaks or hangs."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from reclaimnet.adapters.nats.campus import Heard
from reclaimnet.apps import notify
from reclaimnet.apps.config import Config, load
from reclaimnet.apps.gateway_view import View
from reclaimnet.apps.notify import Notifier, Observer, Told
from reclaimnet.errors import BadConfig
from reclaimnet.model.market import Card, Gpu, GpuId, JobId, NodeId
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobRecord, JobSpec, JobState

GPUS = tuple(Gpu(id=GpuId(f"G{i}"), index=i) for i in range(2))
LAB = NodeId("lab")


def config(tmp_path: Path, **values: str) -> Config:
    env = {f"RECLAIMNET_NOTIFY__{key.upper()}": value for key, value in values.items()}
    none = tmp_path / "none.toml"
    return load(env={"HOME": str(tmp_path), **env}, project=none, system=none)


def record(revision: int, state: JobState, **fields: Any) -> JobRecord:
    spec = JobSpec(name="train", user="ada", command=("x",))
    return JobRecord(
        id=JobId("j-1"), spec=spec, submitted_at=0, revision=revision, state=state, **fields
    )


async def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.01)


async def seen(view: View, *happens: Any) -> list[Told]:
    """What an observer that listens all the time makes of it."""
    observer, told = Observer(), []
    changes = view.changes()
    try:
        while True:
            change = await anext(changes)
            assert change is not None
            observer.see(change, 0)
            if change.event == "current":
                break
        for each in happens:
            if isinstance(each, JobRecord):
                view.see_record(each)
            else:
                view.see_card(Heard(card=each, age=0))
            change = await anext(changes)
            assert change is not None
            told += observer.see(change, 5 * SECOND)
    finally:
        await changes.aclose()
    return told


async def test_moves_ends_and_reclaims_are_worth_a_message() -> None:
    view = View()
    view.see_record(record(1, JobState.RUNNING, epoch=1, holder=LAB))
    view.see_card(Heard(card=Card(node=LAB, gpus=GPUS), age=0))
    told = await seen(
        view,
        Card(node=LAB, gpus=GPUS, leaving=(GPUS[0].id,), deadline=15 * SECOND),
        Card(node=LAB, gpus=GPUS, leaving=(GPUS[0].id,), deadline=15 * SECOND),
        record(2, JobState.MIGRATING, epoch=1, holder=LAB),
        record(3, JobState.CONFIGURING, epoch=2, holder=NodeId("office")),
        record(4, JobState.RUNNING, epoch=2, holder=NodeId("office"), moves=1),
        record(5, JobState.RUNNING, epoch=2, holder=NodeId("office"), moves=1, step=7),
        record(6, JobState.COMPLETED, epoch=2, moves=1, step=9),
    )
    assert [each.event for each in told] == ["node.reclaimed", "job.moved", "job.completed"]
    assert "within 10s" in told[0].text
    assert "office" in told[1].text


async def test_what_was_so_before_is_not_told() -> None:
    view = View()
    view.see_record(record(1, JobState.FAILED, reason="its own fault"))
    assert await seen(view) == []


async def test_a_message_arrives_by_webhook_and_by_command(tmp_path: Path) -> None:
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append({"path": self.path, **json.loads(body)})
            # The first time it fails, as such things do.
            self.send_response(500 if len(got) == 1 else 204)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    mail = tmp_path / "mail"
    try:
        notifier = Notifier(
            config(
                tmp_path,
                webhook=f"http://127.0.0.1:{server.server_address[1]}/hook/secret",
                command=f"sh -c 'cat >> {mail}; echo $RN_EVENT >> {mail}; env >> {mail}'",
                events="job.failed",
            )
        )
        assert notifier.is_wanted
        notifier.put([Told(event="job.moved", text="not asked for", at=1)])
        notifier.put([Told(event="job.failed", text="train failed.", at=1, job="j-1")])
        running = asyncio.create_task(notifier.run(View()))
        await until(lambda: mail.exists() and "PATH=" in mail.read_text())
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert [(each["event"], each["text"], each["job"]) for each in got] == [
        ("job.failed", "train failed.", "j-1")
    ] * 2
    text = mail.read_text()
    assert text.startswith("train failed.\njob.failed\n")
    assert "RECLAIMNET_" not in text


async def test_what_cannot_be_delivered_is_dropped_without_its_secret_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notify, "PAUSE_S", 0.0)
    monkeypatch.setattr(notify, "QUEUE", 2)
    notifier = Notifier(
        config(
            tmp_path, webhook="http://user:hunter2@127.0.0.1:1/hook/s3cret", command="false s3cret"
        )
    )
    with caplog.at_level(logging.DEBUG):
        notifier.put([Told(event="job.failed", text=f"{i}", at=1) for i in range(3)])
        assert notifier.dropped == 1
        running = asyncio.create_task(notifier.run(View()))
        await until(lambda: caplog.text.count("was not told") >= 4)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert "127.0.0.1" in caplog.text
    for secret in ("s3cret", "hunter2"):
        assert secret not in caplog.text


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"webhook": "ftp://x"}, "http"),
        ({"command": "mail 'x"}, "notify.command"),
        ({"events": "job.done"}, "job.completed|job.moved"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, values: Any, said: str) -> None:
    with pytest.raises(BadConfig, match=said):
        Notifier(config(tmp_path, **values))
