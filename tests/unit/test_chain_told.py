"""What a keeper tells the campus of its chain, and that it never depends on being heard."""

import threading
from pathlib import Path

from tests.fake_gateway import TOKEN, serving
from tests.live.waiting import until

from reclaimnet.apps.chain_told import ChainTold, LinkTold, Teller, told_of
from reclaimnet.apps.config import Config, load
from reclaimnet.model.units import SECOND

REPORT = {
    "phase": "active",
    "up": True,
    "policy": "plan",
    "handover": "service",
    "jobs": 3,
    "gap_s": 12.5,
    "overlap_s": 60.0,
    "successor_waits": "waits for resources",
    "next_start": {"in_s": 30.0, "low_s": 10.0, "high_s": None, "why": ""},
    "words": "w" * 5000,
    "links": [
        {"number": 2, "id": "41", "state": "running", "submitted": 1, "started": 2, "ready": None,
         "ended": None, "ends_at": 90},
        {"number": 3, "id": "42", "state": "pending", "submitted": 5, "started": None,
         "ready": None, "ended": None, "ends_at": None},
    ],
}  # fmt: skip


def configured(home: Path, url: str) -> Config:
    env = {"RECLAIMNET_GATEWAY__URL": url, "RECLAIMNET_GATEWAY__TOKEN": TOKEN, "HOME": str(home)}
    return load(env=env if url else {"HOME": str(home)}, project=home / "no", system=home / "no")


def test_a_report_is_told_in_absolute_times_and_bounded_words() -> None:
    told = told_of(REPORT, user="ada", now=100 * SECOND)
    assert (told.user, told.gap_s, told.overlap_s, told.jobs) == ("ada", 12.5, 60.0, 3)
    assert (told.next_start, told.next_low, told.next_high) == (130 * SECOND, 110 * SECOND, 0)
    assert len(told.words) == 1000
    assert told.links == [
        LinkTold(number=2, id="41", state="running", submitted=1, started=2, ends=90),
        LinkTold(number=3, id="42", state="pending", submitted=5),
    ]


def test_the_campus_is_told_at_once_and_how_it_ended(tmp_path: Path) -> None:
    phase = "active"
    with serving() as fake:
        config = configured(tmp_path, fake.url)
        with Teller(config, "serve", lambda: ChainTold(phase=phase, up=phase == "active")):
            until(lambda: "serve" in fake.chains, "it was told")
            assert fake.chains["serve"]["phase"] == "active"
            phase = "completed"
        until(lambda: fake.chains["serve"]["phase"] == "completed", "its end was told")


def test_a_chain_goes_on_where_nobody_listens(tmp_path: Path) -> None:
    asked = threading.Event()

    def report() -> ChainTold:
        asked.set()
        return ChainTold(phase="active", up=True)

    with Teller(configured(tmp_path, "http://127.0.0.1:9"), "serve", report):
        assert asked.wait(60)
    with Teller(configured(tmp_path, ""), "serve", report):
        pass
