"""Who may fetch checkpoints from an agent, and what the others are told."""

from typing import Any

import pytest

from reclaimnet.adapters.tls import ca
from reclaimnet.apps.agent import _Gate
from reclaimnet.model.market import JobId


class Anybody:
    """Serves every peer that it is asked about."""

    def may_read(self, common_name: str, job: JobId) -> bool:
        return True


@pytest.mark.parametrize(
    ("awake", "lent", "peer", "objection"),
    [
        (False, False, "node:other", "its agent is just starting"),
        (True, True, "node:other", ""),
        (True, False, "node:other", "its owner's deadline has passed"),
        (True, False, ca.GATEWAY, ""),
    ],
)
def test_who_is_not_served_is_told_what_is_the_case(
    awake: bool, lent: bool, peer: str, objection: str
) -> None:
    gate = _Gate(awake=lambda: awake)
    anybody: Any = Anybody()
    gate.serving, gate.serves = anybody, lambda: lent
    assert gate.objection(peer) == objection


def test_before_there_is_a_world_nobody_is_served() -> None:
    gate = _Gate(awake=lambda: False)
    for peer in ("node:other", ca.GATEWAY):
        assert gate.objection(peer) == "its agent is just starting"
        assert not gate.may_read(peer, JobId("j"))
