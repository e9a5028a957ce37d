"""The controller: what it writes, that it comes to rest, and when it asks a lent pod's agent."""

import json
import time
from typing import Any

import pytest
from tests.fake_kube import FakeApi

from reclaimnet.adapters.kube.client import EVENTS, LINKS, NODES, PODS, RHYTHMS
from reclaimnet.adapters.kube.mirror import Mirror
from reclaimnet.apps.client import Node
from reclaimnet.apps.kube_controller import LOOK_AGAIN_S, RESYNC_S, Controller
from reclaimnet.apps.kube_view import mirror_of
from reclaimnet.errors import Unavailable, UsageError
from reclaimnet.model.asking import LendRequest, ReclaimRequest, Reply, Request, WithdrawRequest
from reclaimnet.model.market import Address, Card, Gpu, GpuId, NodeId
from reclaimnet.model.units import SECOND

GPU = Gpu(id=GpuId("gpu-0"), index=0)


ADDRESS = "10.0.0.9"


def a_card(node: str, **fields: Any) -> Card:
    return Card(node=NodeId(node), address=Address(host=ADDRESS, port=1), **fields)


class FakeCampus:
    """A gateway whose nodes do as they are asked, unless somebody else has asked since."""

    def __init__(self) -> None:
        self.cards: dict[str, Card] = {}
        self.said: dict[str, int] = {}
        """When somebody last spoke to each node."""
        self.asked: list[tuple[str, Request]] = []
        self.silent = False
        self.refuses = ""

    def join(self, name: str, *, lends: bool = False) -> None:
        self.cards[name] = a_card(name, gpus=(GPU,) if lends else ())

    def nodes(self) -> list[Node]:
        if self.silent:
            raise Unavailable("the gateway does not answer")
        return [Node(card=card) for card in self.cards.values()]

    def ask(self, node: str, request: Request) -> Reply:
        self.asked.append((node, request))
        if self.refuses:
            raise UsageError(self.refuses)
        as_of = getattr(request, "as_of", None)
        if as_of is not None and self.said.get(node, as_of) != as_of:
            raise UsageError("the owner has said something else since")
        return self.hear(node, request)

    def hear(self, node: str, request: Request) -> Reply:
        """From the controller or, if a test calls it, from the owner."""
        gpus = self.cards[node].gpus
        self.said[node] = len(self.said) + sum(self.said.values()) + 1
        match request:
            case LendRequest():
                self.cards[node] = a_card(node, gpus=(GPU,))
            case ReclaimRequest():
                self.cards[node] = a_card(node, gpus=gpus, leaving=(GPU.id,))
            case _:
                self.cards[node] = a_card(node, gpus=gpus)
        return Reply(ok=True, text="as you wish", said_at=self.said[node])

    def guests_leave(self, node: str) -> None:
        """What is under notice is lent no more."""
        self.cards[node] = a_card(node)


class Stage:
    def __init__(self) -> None:
        self.api = FakeApi()
        self.campus = FakeCampus()
        for name in ("a1", "b1"):
            self.api.create(NODES, {"metadata": {"name": name, "labels": {"rack": name[0]}}})
            spec = {"rate": "1G", "nodeSelector": {"matchLabels": {"rack": name[0]}}}
            self.api.create(LINKS, {"metadata": {"name": name[0]}, "spec": spec})
        self.mirror: Mirror = mirror_of(self.api)
        self.mirror.start()
        self.controller = Controller(self.api, self.mirror, self.campus)

    def pod(self, name: str, node: str = "a1", address: str = ADDRESS, **notes: str) -> None:
        meta = {"name": name, "annotations": {f"reclaimnet.io/{k}": v for k, v in notes.items()}}
        spec = {"nodeName": node, "terminationGracePeriodSeconds": 60}
        body = {"metadata": meta, "spec": spec, "status": {"phase": "Running", "podIP": address}}
        self.api.create(PODS, body, namespace="ns")

    def reconcile(self) -> float:
        """After the mirror has caught up with what was written."""
        self.catch_up()
        return self.controller.reconcile()

    def catch_up(self) -> None:
        marker = f"marker-{time.monotonic_ns()}"
        for kind, namespace in ((PODS, "zz"), (NODES, None), (LINKS, None), (RHYTHMS, "zz")):
            spec = {"rate": "1G", "nodeSelector": {"matchLabels": {"none": "such"}}}
            body = {"metadata": {"name": marker}, "spec": spec}
            self.api.create(kind, body, namespace=namespace)
            key = marker if namespace is None else f"zz/{marker}"
            assert self.mirror.await_that(
                lambda kind=kind, key=key: self.mirror.get(kind, key) is not None, 10
            )
            self.api.remove(kind, marker, namespace=namespace)
            assert self.mirror.await_that(
                lambda kind=kind, key=key: self.mirror.get(kind, key) is None, 10
            )

    def note(self, pod: str, name: str) -> str:
        notes = self.api.get(PODS, pod, namespace="ns")["metadata"]["annotations"]
        return str(notes.get(f"reclaimnet.io/{name}", ""))

    def events(self, reason: str) -> list[str]:
        found = self.api.objects.get(EVENTS, {}).values()
        return [one["message"] for one in found if one["reason"] == reason]

    def condition(self, kind: Any, name: str, namespace: str | None = None) -> tuple[str, str]:
        (one,) = self.api.get(kind, name, namespace=namespace)["status"]["conditions"]
        return one["status"], one["reason"]


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_links_and_rhythms_say_how_they_are(stage: Stage) -> None:
    spec = {"period": "300ms", "bursts": [{"length": "180ms", "rate": "1G"}]}
    stage.api.create(RHYTHMS, {"metadata": {"name": "heavy"}, "spec": spec}, namespace="ns")
    stage.pod("one", rhythm="heavy")
    stage.reconcile()
    assert stage.condition(LINKS, "a") == ("True", "BurstsFit")
    assert stage.condition(RHYTHMS, "heavy", "ns") == ("True", "BurstsFit")
    stage.pod("two", rhythm="heavy")
    stage.reconcile()
    assert stage.condition(LINKS, "a") == ("False", "Overfull")
    assert stage.condition(LINKS, "b") == ("True", "BurstsFit")
    assert stage.condition(RHYTHMS, "heavy", "ns") == ("False", "Overfull")
    assert stage.api.get(LINKS, "a")["status"]["jobs"] == ["ns/one", "ns/two"]
    assert stage.events("RhythmConflict") == ["2 jobs on a: expected slowdown 1.25"] * 2


def test_a_link_that_carries_nothing_says_so_and_is_none(stage: Stage) -> None:
    stage.api.create(LINKS, {"metadata": {"name": "zero"}, "spec": {"rate": "0"}})
    stage.pod("one", rhythm="300ms: 60ms@1G")
    stage.reconcile()
    assert stage.condition(LINKS, "zero") == ("False", "Unreadable")
    assert stage.api.get(LINKS, "a")["status"]["jobs"] == ["ns/one"]


def test_it_comes_to_rest(stage: Stage) -> None:
    stage.pod("one", rhythm="300ms: 60ms@1G")
    stage.pod("two", rhythm="300ms: 60ms@1G")
    stage.reconcile()
    stage.reconcile()
    before = [one for one in stage.api.writes if "marker" not in one[1]]
    assert stage.reconcile() == RESYNC_S
    assert [one for one in stage.api.writes if "marker" not in one[1]] == before


def test_a_rotation_stays_when_others_come_and_when_the_controller_restarts(stage: Stage) -> None:
    stage.pod("one", rhythm="300ms: 60ms@1G")
    stage.pod("two", rhythm="300ms: 60ms@1G")
    stage.reconcile()
    before = json.loads(stage.note("one", "rotation"))
    assert before["period"] >= 300_000_000
    stage.pod("elsewhere", node="b1", rhythm="300ms: 60ms@1G")
    stage.reconcile()
    assert json.loads(stage.note("one", "rotation")) == before
    stage.controller = Controller(stage.api, stage.mirror, stage.campus)
    stage.reconcile()
    after = json.loads(stage.note("one", "rotation"))
    apart = (after["anchor"] - before["anchor"]) % before["period"]
    assert min(apart, before["period"] - apart) < before["period"] // 100


def test_a_pod_is_lent_when_its_agent_has_joined(stage: Stage) -> None:
    stage.pod("p", lend="true")
    assert stage.reconcile() == LOOK_AGAIN_S
    assert stage.campus.asked == []
    stage.campus.join("p")
    stage.reconcile()
    assert stage.campus.asked == [("p", LendRequest(notice=55 * SECOND, as_of=0))]
    assert stage.reconcile() == RESYNC_S
    assert stage.events("Lent") == ["as you wish"]


def test_a_cordon_is_a_notice_that_an_uncordon_withdraws(stage: Stage) -> None:
    stage.campus.join("p", lends=True)
    stage.pod("p", lend="true")
    stage.api.patch(NODES, "a1", {"spec": {"unschedulable": True}})
    stage.reconcile()
    ((_, request),) = stage.campus.asked
    assert isinstance(request, ReclaimRequest)
    assert request.reason == "node a1 is cordoned"
    assert 54 * SECOND < (request.grace or 0) <= 55 * SECOND
    assert stage.note("p", "notice").endswith("node a1 is cordoned")
    stage.reconcile()
    assert len(stage.campus.asked) == 1, "asked once"
    stage.api.patch(NODES, "a1", {"spec": {"unschedulable": None}})
    stage.reconcile()
    _, request = stage.campus.asked[-1]
    assert isinstance(request, WithdrawRequest)
    assert stage.note("p", "notice") == ""


def test_what_all_guests_have_left_for_a_cordon_is_lent_again_after_it(stage: Stage) -> None:
    stage.pod("p", lend="true")
    stage.campus.join("p")
    stage.reconcile()
    stage.api.patch(NODES, "a1", {"spec": {"unschedulable": True}})
    stage.reconcile()
    stage.campus.guests_leave("p")
    stage.controller = Controller(stage.api, stage.mirror, stage.campus)
    stage.reconcile()
    assert not stage.campus.cards["p"].gpus
    stage.api.patch(NODES, "a1", {"spec": {"unschedulable": None}})
    stage.reconcile()
    stage.reconcile()
    assert stage.campus.cards["p"].gpus == (GPU,)
    assert stage.note("p", "notice") == ""


def test_what_its_owner_has_taken_back_is_not_lent_until_the_owner_lends_it(stage: Stage) -> None:
    stage.pod("p", lend="true")
    stage.campus.join("p")
    stage.reconcile()
    assert stage.campus.cards["p"].gpus
    stage.campus.hear("p", ReclaimRequest(grace=0))
    stage.campus.guests_leave("p")
    assert stage.reconcile() == RESYNC_S
    assert stage.campus.cards["p"].gpus == ()
    assert stage.events("LoanFailed") == ["the owner has said something else since"]
    asked = list(stage.campus.asked)
    stage.reconcile()
    assert stage.campus.asked == asked, "an owner who has spoken is not asked at every change"
    stage.api.patch(NODES, "a1", {"spec": {"unschedulable": True}})
    stage.reconcile()
    stage.api.patch(NODES, "a1", {"spec": {"unschedulable": None}})
    stage.controller = Controller(stage.api, stage.mirror, stage.campus)
    stage.reconcile()
    assert stage.campus.cards["p"].gpus == ()
    stage.campus.hear("p", LendRequest())
    stage.api.patch(NODES, "a1", {"spec": {"unschedulable": True}})
    stage.reconcile()
    stage.campus.guests_leave("p")
    stage.api.patch(NODES, "a1", {"spec": {"unschedulable": None}})
    stage.reconcile()
    stage.reconcile()
    assert stage.campus.cards["p"].gpus == (GPU,), "it was the cordon that had ended the loan"


@pytest.mark.parametrize("first", ["the owner", "the cordon"])
def test_an_uncordon_does_not_withdraw_what_the_owner_has_asked(stage: Stage, first: str) -> None:
    stage.campus.join("p", lends=True)
    stage.pod("p", lend="true")
    if first == "the owner":
        stage.campus.hear("p", ReclaimRequest())
    stage.api.patch(NODES, "a1", {"spec": {"unschedulable": True}})
    stage.reconcile()
    if first == "the cordon":
        stage.campus.hear("p", ReclaimRequest())
    stage.api.patch(NODES, "a1", {"spec": {"unschedulable": None}})
    stage.reconcile()
    assert stage.campus.cards["p"].leaving == (GPU.id,)
    assert stage.note("p", "notice") == ""
    assert stage.events("NotWithdrawn") == ["the owner has said something else since"]
    stage.campus.guests_leave("p")
    stage.reconcile()
    assert stage.campus.cards["p"].gpus == ()


def test_an_eviction_that_comes_sooner_than_the_notice_shortens_it(stage: Stage) -> None:
    stage.campus.join("p", lends=True)
    stage.pod("p", lend="true")
    stage.api.patch(NODES, "a1", {"spec": {"unschedulable": True}})
    stage.reconcile()
    soon = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 20))
    stage.api.patch(PODS, "p", {"metadata": {"deletionTimestamp": soon}}, namespace="ns")
    stage.reconcile()
    _, request = stage.campus.asked[-1]
    assert isinstance(request, ReclaimRequest)
    assert request.reason == "pod p is evicted or deleted"
    assert 10 * SECOND < (request.grace or 0) <= 15 * SECOND


def test_an_annotation_that_is_not_true_ends_the_loan(stage: Stage) -> None:
    stage.campus.join("p", lends=True)
    stage.pod("p", lend="false")
    stage.reconcile()
    ((_, request),) = stage.campus.asked
    assert isinstance(request, ReclaimRequest)
    stage.pod("never-said")
    stage.campus.join("never-said", lends=True)
    stage.reconcile()
    assert len(stage.campus.asked) == 1, "an agent that nobody annotated is none of ours"


def test_a_campus_that_is_silent_or_refuses_is_said_on_the_pod(stage: Stage) -> None:
    stage.pod("p", lend="true")
    stage.campus.silent = True
    with pytest.raises(Unavailable):
        stage.reconcile()
    assert stage.events("CampusSilent") == ["the gateway does not answer"]
    stage.campus.silent = False
    stage.campus.join("p")
    stage.campus.refuses = "there is no GPU to lend"
    assert stage.reconcile() == RESYNC_S
    assert stage.events("LoanFailed") == ["there is no GPU to lend"]


def test_one_object_that_cannot_be_written_does_not_stop_the_others(stage: Stage) -> None:
    stage.pod("one", rhythm="300ms: 60ms@1G")
    stage.pod("two", node="b1", rhythm="300ms: nonsense")
    whole = stage.api.patch

    def flaky(kind: Any, name: str, *args: Any, **options: Any) -> dict[str, Any]:
        if kind is LINKS and name == "a":
            raise Unavailable("the API server failed")
        return whole(kind, name, *args, **options)

    stage.api.patch = flaky  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        stage.reconcile()
    assert stage.condition(LINKS, "b") == ("True", "BurstsFit")
    assert stage.events("RhythmUnreadable")


def test_a_pod_that_is_called_like_a_node_elsewhere_cannot_speak_for_it(stage: Stage) -> None:
    stage.campus.join("lab1", lends=True)
    stage.pod("lab1", address="10.0.0.66", lend="false")
    stage.reconcile()
    assert stage.campus.asked == []
    assert stage.events("LoanFailed") == [
        f"the agent called lab1 is at {ADDRESS}, which is not here"
    ]
