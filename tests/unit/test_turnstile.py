"""What the guard is asked about slots, before any of it reaches the kernel."""

from pathlib import Path
from typing import Any

import pytest

from reclaimnet.adapters.linux.slots import MAX_SLOTS, Turnstile
from reclaimnet.errors import Unavailable, UsageError

GROUP = Path("group")


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"period": -1},
        {"period": True},
        {"period": "1"},
        {"period": 1 << 63},
        {"period": 10**9, "slots": [[1]]},
        {"period": 10**9, "slots": {"1": 2}},
        {"period": 10**9, "slots": [[1, "2"]]},
        {"period": 10**9, "anchor": None, "slots": [[1, 2]]},
    ],
)
def test_what_is_no_plan_is_refused_in_a_sentence(request_: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="must be"):
        Turnstile("eth0", netns=None).ask(0, GROUP, request_)


@pytest.mark.parametrize("slots", [[], [[0, 5]] * (MAX_SLOTS + 1)])
def test_slots_are_bounded(slots: list[list[int]], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There may be 1 to"):
        Turnstile("eth0", netns=tmp_path).ask(0, GROUP, {"period": 10**9, "slots": slots})


def test_without_a_lane_nobody_is_held_and_everybody_may_be_let_go() -> None:
    turnstile = Turnstile("eth0", netns=None)
    with pytest.raises(Unavailable, match="it takes a lane"):
        turnstile.ask(0, GROUP, {"period": 10**9, "slots": [[0, 5]]})
    assert turnstile.ask(0, None, {"period": 0}) == {}
    assert turnstile.lane == 0
    turnstile.close()
