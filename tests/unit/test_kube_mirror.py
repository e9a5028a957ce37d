"""The mirror: what was missed while a watch was broken is there afterwards."""

import queue
from collections.abc import Iterator
from typing import Any

import pytest
from tests.fake_kube import FakeApi

from reclaimnet.adapters.kube import mirror as mirror_module
from reclaimnet.adapters.kube.client import NODES, Gone
from reclaimnet.adapters.kube.mirror import Mirror
from reclaimnet.adapters.kube.read import node_of
from reclaimnet.errors import ReclaimNetError, Unavailable


class Breakable(FakeApi):
    """Its watches end with what is put into `breaks`, and tell nothing meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.breaks: queue.Queue[ReclaimNetError] = queue.Queue()
        self.lists = 0

    def list(self, kind: Any) -> tuple[list[dict[str, Any]], str]:
        self.lists += 1
        return super().list(kind)

    def watch(self, kind: Any, version: str) -> Iterator[tuple[str, dict[str, Any]]]:
        raise self.breaks.get()
        yield


@pytest.mark.parametrize("error", [Gone("too old"), Unavailable("it does not answer")])
def test_after_a_broken_watch_everything_is_listed_anew(
    monkeypatch: pytest.MonkeyPatch, error: ReclaimNetError
) -> None:
    monkeypatch.setattr(mirror_module, "BACK_OFF_S", 0.001)
    api = Breakable()
    api.create(NODES, {"metadata": {"name": "old"}})
    mirror = Mirror(api, {NODES: node_of})
    mirror.start()
    api.create(NODES, {"metadata": {"name": "new"}})
    api.remove(NODES, "old")
    assert [node.name for node in mirror.all(NODES)] == ["old"]
    api.breaks.put(error)
    assert mirror.await_that(lambda: [n.name for n in mirror.all(NODES)] == ["new"], 10)
    assert api.lists == 2
    mirror.close()
    api.breaks.put(error)


def test_what_is_wrong_at_the_start_is_raised() -> None:
    class Silent(FakeApi):
        def list(self, kind: Any) -> tuple[list[dict[str, Any]], str]:
            raise Unavailable("it does not answer")

    with pytest.raises(Unavailable):
        Mirror(Silent(), {NODES: node_of}).start()


def test_what_cannot_be_read_is_kept_with_the_reason() -> None:
    api = FakeApi()
    api.create(NODES, {"metadata": {"name": "n"}, "spec": 1})
    mirror = Mirror(api, {NODES: node_of})
    mirror.start()
    assert mirror.all(NODES) == []
    ((item, why),) = mirror.unreadable(NODES)
    assert (item["metadata"]["name"], bool(why)) == ("n", True)
    mirror.close()
