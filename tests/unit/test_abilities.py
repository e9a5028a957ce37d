"""What not every node can do: told by its card, asked for by the job, refused at submission."""

from dataclasses import dataclass
from typing import Any, cast

import pytest

from reclaimnet.adapters.linux import criu
from reclaimnet.apps.gateway_desk import Desk
from reclaimnet.engine.body import Body
from reclaimnet.engine.node import Node
from reclaimnet.errors import UsageError
from reclaimnet.model import events as ev
from reclaimnet.model.market import Card, Gauge, Gpu, GpuId, JobId, NodeId, Offer
from reclaimnet.model.orders import Tell
from reclaimnet.model.probing import Probe, ProbeId, Purpose
from reclaimnet.model.units import GIB, SECOND
from reclaimnet.model.work import JobSpec, Saving, shape_of
from reclaimnet.policy.place import MOST_USEFUL, Candidate, Need
from reclaimnet.policy.suite import Suite

UNKNOWING = JobSpec(name="j", user="u", command=("true",), saving=Saving.CRIU)
GPU = Gpu(id=GpuId("g"), index=0)


def card(name: str, **fields: Any) -> Card:
    return Card(node=NodeId(name), gpus=(GPU,), vacant=(GPU.id,), **fields)


@dataclass
class Seen:
    card: Card


class SomeNodes:
    def __init__(self, *cards: Card) -> None:
        self._cards = cards

    def nodes(self) -> list[Seen]:
        return [Seen(each) for each in self._cards]


def submitted(spec: JobSpec, *cards: Card) -> None:
    Desk(cast(Any, None), cast(Any, SomeNodes(*cards)), "0")._check_abilities(spec)


def test_where_no_node_can_save_it_the_job_is_refused_with_each_nodes_reason() -> None:
    cannot = card("lab1", obstacles=("criu: criu is not installed",))
    with pytest.raises(UsageError, match=r"by criu \(lab1: criu is not installed\); use --saving"):
        submitted(UNKNOWING, cannot)
    submitted(UNKNOWING, cannot, card("lab2", abilities=("criu",)))
    submitted(JobSpec(name="j", user="u", command=("true",)), cannot)


def test_a_campus_without_nodes_yet_accepts_it() -> None:
    submitted(UNKNOWING)


def test_more_memory_than_any_node_has_is_refused_at_submission() -> None:
    spec = JobSpec(name="j", user="u", command=("true",), memory_bytes=64 * GIB)
    with pytest.raises(UsageError, match=r"no node has 64.0 GiB of memory; the largest has 32.0"):
        submitted(spec, card("lab1", memory=Gauge(limit=32 * GIB, used=0)))
    submitted(spec, card("lab1", memory=Gauge(limit=128 * GIB, used=0)))


def test_only_nodes_that_can_save_it_are_asked() -> None:
    need = Need(job=JobId("j"), shape=shape_of(UNKNOWING))
    able, unable = card("able", abilities=("criu",)), card("unable")
    ranked = MOST_USEFUL(need, [Candidate(card=able), Candidate(card=unable)], 0)
    assert ranked.nodes == ("able",)
    assert ranked.decision.refused == ("unable: cannot do what the job needs: criu",)


@pytest.mark.parametrize("abilities", [(), ("criu",)])
def test_a_node_that_cannot_says_so_when_it_is_probed(abilities: tuple[str, ...]) -> None:
    node = Node(Body(node=NodeId("n"), abilities=abilities), Suite())
    node.handle(ev.LendAsked(request="r", offer=Offer(provider="p", gpus=(GPU,))), SECOND)
    probe = Probe(
        id=ProbeId("p"),
        asker=NodeId("m"),
        job=JobId("j"),
        shape=shape_of(UNKNOWING),
        purpose=Purpose.MOVE,
    )
    orders = node.handle(ev.ProbeArrived(probe=probe), SECOND)
    (answer,) = [order.event for order in orders if isinstance(order, Tell)]
    assert isinstance(answer, ev.ProbeAnswered)
    assert (answer.ticket is not None) == bool(abilities)
    assert answer.reasons == (() if abilities else ("cannot do what the job needs: criu",))
    assert node.card().abilities == abilities


def test_a_node_short_of_memory_comes_last_and_says_why_it_cannot_be() -> None:
    shape = shape_of(JobSpec(name="j", user="u", command=("true",)))
    full = Gauge(limit=32 * GIB, used=31 * GIB)
    cramped, roomy = card("a", short_of_memory=True, memory=full), card("b")
    candidates = [Candidate(card=cramped), Candidate(card=roomy)]
    assert MOST_USEFUL(Need(job=JobId("j"), shape=shape), candidates, 0).nodes == ("b", "a")
    asks = shape_of(JobSpec(name="j", user="u", command=("true",), memory_bytes=2 * GIB))
    ranked = MOST_USEFUL(Need(job=JobId("j"), shape=asks), candidates, 0)
    assert ranked.nodes == ("b",)
    assert ranked.decision.refused == ("a: 1.0 GiB of 32.0 GiB memory free, not 2.0 GiB",)


def test_crius_words_are_read_as_they_are() -> None:
    assert criu.parse_version("Version: 4.1.1\nGitID: v4.1.1\n") == (4, 1)
    assert criu.parse_version("Version: 3.17.1\n") < criu.LEAST
    said = "inet: Connected TCP socket, consider using --tcp-established option."
    assert criu.explain(said).startswith("it keeps a network connection open (")
    assert criu.explain("something new") == "something new"


def test_without_root_or_criu_the_obstacle_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criu.os, "geteuid", lambda: 1000)
    assert "root" in criu.obstacle.__wrapped__()
    monkeypatch.setattr(criu.os, "geteuid", lambda: 0)
    monkeypatch.setattr(criu, "program", lambda name: None)
    assert criu.obstacle.__wrapped__() == "criu is not installed"
