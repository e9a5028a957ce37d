"""Iteration marks of the SDK, the rule by which iterations wait, and byte counters."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reclaimnet import sdk
from reclaimnet.adapters.linux.counters import Traffic, net_dev, parse_net_dev
from reclaimnet.apps.bench.rhythm_stage import make_run_dir
from reclaimnet.errors import NotFound
from reclaimnet.model.page import LATE, Word, wait_before
from reclaimnet.model.units import MILLISECOND


def test_iterations_are_marked_and_wait_for_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, words = make_run_dir(tmp_path / "run")
    monkeypatch.setenv("RN_RUN_DIR", str(run_dir))
    with sdk.job() as job:
        job.restore({"step": 0})
        job.iteration()
        assert words[Word.ITERATION] == 1
        free = words[Word.ITERATION_READY_AT], words[Word.ITERATION_AT]
        assert free[0] == free[1]
        period = 40 * MILLISECOND
        words[Word.ROTATION_ANCHOR] = free[0] + period // 2
        words[Word.ROTATION_BOUND] = period
        words[Word.ROTATION_PERIOD] = period
        job.iteration()
        ready, began = words[Word.ITERATION_READY_AT], words[Word.ITERATION_AT]
        wait, settled = wait_before(
            ready, anchor=free[0] + period // 2, period=period, bound=period, settled=False
        )
        assert settled
        assert began - ready >= wait
        assert words[Word.ITERATION] == 2


def test_outside_of_reclaimnet_iterations_just_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RN_RUN_DIR", raising=False)
    with sdk.job() as job:
        job.iteration()


def test_a_rotation_that_a_file_tells_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RN_RUN_DIR", raising=False)
    monkeypatch.setenv("RN_ROTATION_FILE", str(tmp_path / "rotation"))
    period = 40 * MILLISECOND
    told = {"anchor": time.time_ns() + period // 2, "period": period}
    (tmp_path / "rotation").write_text(json.dumps(told))
    with sdk.job() as job:
        asked = time.time_ns()
        job.iteration()
        began = time.time_ns()
    wait, _ = wait_before(asked, anchor=told["anchor"], period=period, bound=period, settled=False)
    assert began - asked >= wait - MILLISECOND


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"anchor": 1, "period": 0}', f'{{"anchor": 1, "period": {10**15}}}']
)
def test_a_rotation_that_makes_no_sense_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.delenv("RN_RUN_DIR", raising=False)
    monkeypatch.setenv("RN_ROTATION_FILE", str(tmp_path / "rotation"))
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waits {seconds} s"))
    if text:
        (tmp_path / "rotation").write_text(text)
    with sdk.job() as job:
        job.iteration()


times = st.integers(0, 10**12)


@given(now=times, anchor=times, period=st.integers(8, 10**9), settled=st.booleans())
def test_whoever_waits_its_wait_begins_in_its_place(
    now: int, anchor: int, period: int, settled: bool
) -> None:
    wait, then = wait_before(now, anchor=anchor, period=period, bound=period, settled=settled)
    assert then
    assert 0 <= wait < period
    late = (now + wait - anchor) % period
    assert late == 0 or (wait == 0 and late <= period // LATE)


@given(now=times, anchor=times, period=st.integers(1000, 10**9), share=st.integers(2, 20))
def test_a_bounded_wait_comes_there_by_degrees(
    now: int, anchor: int, period: int, share: int
) -> None:
    bound = period // share
    settled = False
    for _ in range(share + 1):
        wait, settled = wait_before(now, anchor=anchor, period=period, bound=bound, settled=settled)
        assert wait <= bound
        now += wait
        if settled:
            break
        now += period
    assert settled


NET_DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo:     100       1    0    0    0     0          0         0      100       1    0    0
  eth0: 2048000    2000    0    0    0     0          0         0   512000     900    0    0
"""


def test_the_kernels_table_of_interfaces_is_read() -> None:
    found = parse_net_dev(NET_DEV)
    assert found == {
        "lo": Traffic(received=100, sent=100),
        "eth0": Traffic(received=2_048_000, sent=512_000),
    }
    assert "lo" in net_dev()


def test_a_process_that_is_gone_has_no_counters() -> None:
    with pytest.raises(NotFound, match="gone"):
        net_dev(1 << 30)
