"""The demo leaves a campus behind that can be played with, whenever it ends."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from reclaimnet.apps import demo
from reclaimnet.errors import ReclaimNetError
from reclaimnet.model.asking import LendRequest, WithdrawRequest
from reclaimnet.model.market import Card, NodeId


@dataclass
class Gateway:
    """One node is not lent any more: its notice has just run out."""

    lent: list[str] = field(default_factory=list)
    submitted: list[str] = field(default_factory=list)

    def nodes(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(card=Card(node=NodeId("birch")))]

    def ask(self, node: str, request: object) -> None:
        if isinstance(request, WithdrawRequest):
            raise ReclaimNetError(f"No notice is running on {node}.")
        assert isinstance(request, LendRequest)
        self.lent.append(node)

    def ship(self, packed: object) -> str:
        return "bundle"

    def submit(self, spec: dict[str, object]) -> None:
        self.submitted.append(str(spec["name"]))


def test_what_was_taken_back_is_lent_again_even_if_the_notice_has_run_out(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    gateway = Gateway()
    demo._settle(gateway, tmp_path)
    assert gateway.lent == ["birch"]
    assert len(gateway.submitted) == 2
