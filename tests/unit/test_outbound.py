"""Transfers under a plan: the convoy, who conducts it, and a node that nobody conducts."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from reclaimnet.engine.body import Body
from reclaimnet.engine.conductor import CONDUCTOR, Conductor
from reclaimnet.engine.convoy import TOLD_FOR, WITNESSES, Convoy
from reclaimnet.engine.neighbourhood import LIVELY, Neighbourhood
from reclaimnet.engine.node import Node
from reclaimnet.engine.outbound import ANSWERED_FOR, TRICKLE, Outbound, Stakes
from reclaimnet.model import events as ev
from reclaimnet.model.market import Card, Gpu, GpuId, JobId, NodeId, Offer, Terms
from reclaimnet.model.moving import UNLIMITED, Link, LinkId, Pace, Transfer, TransferId
from reclaimnet.model.orders import Order, SetPace, Tell
from reclaimnet.model.rhythm import Burst, Rhythm
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.model.work import JobRecord, JobSpec, shape_of
from reclaimnet.policy.pace import least_rate_first
from reclaimnet.policy.place import MOST_USEFUL, Need
from reclaimnet.policy.rotate import rotate
from reclaimnet.policy.suite import Suite
from reclaimnet.policy.topology import parse_topology
from reclaimnet.policy.view import view

MB = 1_000_000
RATE = 100 * MB
LINK = Link(id=LinkId("l"), rate=RATE)
A, B, C = (NodeId(name) for name in "abc")


def transfer(name: str, left: int, deadline: int | None = None, **fields: object) -> Transfer:
    return Transfer(
        id=TransferId(name),
        job=JobId(name),
        left=left,
        path=(LINK.id,),
        deadline=deadline,
        **fields,
    )


def rates(convoy: Convoy, now: int) -> dict[str, int]:
    return {pace.transfer: pace.rate for pace in convoy.make_plan(now).paces}


# --- the convoy ----------------------------------------------------------------------------


def test_a_third_transfer_changes_the_plan_of_the_first_two() -> None:
    convoy = Convoy([LINK], least_rate_first)
    convoy.told(A, [transfer("x", 500 * MB, 10 * SECOND)], 0)
    assert rates(convoy, 0) == {"x": RATE}
    convoy.told(B, [transfer("y", 200 * MB, 20 * SECOND)], 0)
    assert rates(convoy, 0) == {"x": RATE - 10 * MB, "y": 10 * MB}
    # The third is the most urgent: it gets what the others do not need.
    convoy.told(C, [transfer("z", 100 * MB, 4 * SECOND)], 0)
    assert rates(convoy, 0) == {"x": 50 * MB, "y": 10 * MB, "z": 40 * MB}
    convoy.told(C, [], SECOND)
    assert rates(convoy, SECOND)["x"] > 80 * MB


def test_a_sender_that_falls_silent_leaves_its_room_to_others() -> None:
    convoy = Convoy([LINK], least_rate_first)
    convoy.told(A, [transfer("x", 5000 * MB, 100 * SECOND)], 0)
    convoy.told(B, [transfer("y", 100 * MB, 90 * SECOND)], 0)
    assert rates(convoy, 0)["x"] < RATE
    later = TOLD_FOR + SECOND
    convoy.told(A, [transfer("x", 4000 * MB, 100 * SECOND)], later)
    assert rates(convoy, later) == {"x": RATE}


def test_a_link_that_carries_less_than_was_said_is_planned_with_what_it_carries() -> None:
    convoy = Convoy([LINK], least_rate_first)
    left = {"x": 1000 * MB, "y": 1000 * MB}
    now = 0
    for _ in range(WITNESSES + 3):
        convoy.told(A, [transfer("x", left["x"], 60 * SECOND)], now)
        convoy.told(B, [transfer("y", left["y"], 80 * SECOND)], now)
        plan = rates(convoy, now)
        now += SECOND
        # Forty of the hundred megabytes get through, whatever is asked for.
        share = 40 * MB / sum(plan.values())
        left = {name: round(left[name] - plan[name] * share) for name in left}
    assert convoy.carries[LINK.id] <= 45 * MB
    # The plan promises no more than that; who goes first may find out that there is more.
    assert plan["y"] < 20 * MB
    assert plan["x"] > 60 * MB


def test_a_link_that_was_slow_for_a_while_is_found_to_carry_all_again() -> None:
    wide = Link(id=LinkId("wide"), rate=10 * RATE)
    convoy = Convoy([LINK, wide], least_rate_first)
    left, now, paces = 20_000 * MB, 0, []
    for second in range(12):
        going = replace(transfer("x", left, 3600 * SECOND), path=(LINK.id, wide.id))
        convoy.told(A, [going], now)
        paces.append(rates(convoy, now)["x"])
        now += 2 * SECOND
        # For a while something that nobody tells of takes most of the narrow link.
        left -= 2 * min(paces[-1], 30 * MB if second < 6 else RATE)
    assert convoy.carries.get(LINK.id, RATE) == RATE
    assert paces[-1] == RATE


def test_a_link_of_which_nobody_has_said_what_it_carries_holds_up_only_those_in_the_way() -> None:
    guess = Link(id=LINK.id, rate=RATE, assumed=True)
    convoy = Convoy([guess], least_rate_first)
    convoy.told(A, [transfer("copy", 1000 * MB)], 0)
    assert rates(convoy, 0)["copy"] == UNLIMITED
    convoy.told(A, [transfer("copy", 1000 * MB), transfer("x", 100 * MB, 10 * SECOND)], 0)
    plan = rates(convoy, 0)
    assert plan["x"] == UNLIMITED
    assert plan["copy"] == 0


def test_what_a_job_waits_for_goes_before_a_periodic_checkpoint() -> None:
    convoy = Convoy([LINK], least_rate_first)
    convoy.told(A, [transfer("copy", 1000 * MB), transfer("r", 1000 * MB, awaited=True)], 0)
    assert rates(convoy, 0) == {"r": RATE, "copy": 0}


# --- the conductor -------------------------------------------------------------------------


def test_who_tells_is_answered_and_others_hear_only_what_is_new() -> None:
    conductor = Conductor(links=[LINK], node=C, stretch="s")

    def told(node: NodeId, *transfers: Transfer) -> dict[NodeId, ev.PacesTold]:
        event = ev.TransfersTold(stretch="s", node=node, at=0, transfers=transfers)
        tells = [o for o in conductor.transfers_told(event, 0) if isinstance(o, Tell)]
        return {t.to: t.event for t in tells if isinstance(t.event, ev.PacesTold)}

    x = transfer("x", 500 * MB, 10 * SECOND, unsaved=SECOND)
    y = transfer("y", 500 * MB, 10 * SECOND, unsaved=SECOND)
    assert set(told(A, x)) == {A}
    assert set(told(B, y)) == {A, B}
    assert set(told(B, y)) == {B}
    # Another clock, the same time left: the plan is the same.
    late = ev.TransfersTold(
        stretch="s", node=B, at=90 * SECOND, transfers=(replace(y, deadline=100 * SECOND),)
    )
    assert [o.to for o in conductor.transfers_told(late, 0) if isinstance(o, Tell)] == [B]
    # Not all can arrive: the one that saves least is given up, and told so.
    big = transfer("z", 900 * MB, 10 * SECOND, unsaved=1)
    assert told(C, big)[C].shed == ("z",)


# --- a node --------------------------------------------------------------------------------


def outbound(
    topology: str | None = None,
    conducts: Callable[[NodeId, str, int], bool] = lambda node, stretch, now: True,
) -> Outbound:
    return Outbound(
        A,
        uplink=Link(id=LinkId("a up"), rate=RATE),
        topology=parse_topology(topology, file="t") if topology else None,
        policy=least_rate_first,
        stakes=lambda job, now: Stakes(deadline=20 * SECOND if job == "j" else None),
        conducts=conducts,
    )


def sent(name: str, left: int, size: int = 1000 * MB, to: NodeId = B) -> ev.BytesSent:
    return ev.BytesSent(transfer=TransferId(name), job=JobId(name), to=to, size=size, left=left)


def set_rates(orders: list[Order]) -> dict[str, int]:
    return {order.transfer: order.rate for order in orders if isinstance(order, SetPace)}


def test_without_a_conductor_the_node_plans_for_its_own_uplink() -> None:
    node = outbound()
    node.sent(sent("j", 500 * MB), 0)
    node.sent(sent("copy", 500 * MB), 0)
    (told,) = node.tell(0)
    assert told.stretch == "a up"
    assert set_rates(node.hold(0)) == {"j": RATE, "copy": TRICKLE}
    (first, second) = node.sending(0)
    assert (first.job, first.deadline, first.planned_by) == ("j", 20 * SECOND, "")
    assert second.job == "copy"


def test_a_conductor_that_falls_silent_is_not_waited_for() -> None:
    node = outbound()
    node.sent(sent("j", 500 * MB), 0)
    node.tell(0)
    slow = Pace(transfer=TransferId("j"), rate=MB)
    node.heard(ev.PacesTold(stretch="a up", node=C, paces=(slow,)), 0)
    assert set_rates(node.hold(0)) == {"j": MB}
    assert node.sending(0)[0].planned_by == C
    node.sent(sent("j", 499 * MB), ANSWERED_FOR)
    assert set_rates(node.hold(ANSWERED_FOR)) == {"j": RATE}


def test_the_word_of_who_conducts_no_more_lapses_at_once() -> None:
    conducting = {C}
    node = outbound(conducts=lambda node, stretch, now: node in conducting)
    node.sent(sent("j", 500 * MB), 0)
    node.tell(0)
    slow = ev.PacesTold(stretch="a up", node=C, paces=(Pace(transfer=TransferId("j"), rate=MB),))
    assert node.heard(slow, 0)
    assert set_rates(node.hold(0)) == {"j": MB}
    assert not node.heard(slow, SECOND), "the same again"
    conducting.clear()
    assert node.sending(SECOND)[0].planned_by == ""
    assert set_rates(node.hold(SECOND)) == {"j": RATE}
    conducting.add(C)
    assert node.heard(replace(slow, paces=()), SECOND), "it is back, with another word"


def test_the_narrowest_of_all_conductors_counts() -> None:
    plan = """
        [core]
        rate = "1G"
        [buildings.p]
        uplink = "1G"
        [buildings.q]
        uplink = "1G"
        [nodes.a]
        building = "p"
        uplink = "1G"
        [nodes.b]
        building = "q"
        uplink = "1G"
    """
    node = outbound(plan)
    node.sent(sent("j", 500 * MB), 0)
    assert [told.stretch for told in node.tell(0)] == ["building p", "building q", "core"]
    for stretch, rate in (("building p", 30 * MB), ("core", 20 * MB), ("building q", 25 * MB)):
        pace = Pace(transfer=TransferId("j"), rate=rate)
        node.heard(ev.PacesTold(stretch=stretch, node=C, paces=(pace,)), 0)
    assert set_rates(node.hold(0)) == {"j": 20 * MB}
    assert set(node.stretches()) == {"building p", "core"}


def test_progress_and_when_it_will_be_there_are_on_the_card() -> None:
    node = outbound()
    node.sent(sent("j", 1000 * MB), 0)
    node.tell(0)
    node.sent(sent("j", 950 * MB), SECOND)
    (told,) = node.sending(SECOND)
    assert (told.bytes_left, told.size, told.rate) == (950 * MB, 1000 * MB, 50 * MB)
    assert told.eta == 20 * SECOND
    node.ended(ev.SendingEnded(transfer=TransferId("j")))
    assert node.sending(SECOND) == ()


def lent(body: Body, now: int) -> Node:
    node = Node(body, Suite())
    offer = Offer(
        provider="o",
        gpus=(Gpu(id=GpuId("g"), index=0),),
        terms=Terms(notice=20 * SECOND),
    )
    node.handle(ev.LendAsked(request="q", offer=offer), now)
    return node


def test_a_node_conducts_its_own_uplink_and_says_so() -> None:
    node = lent(Body(node=A, uplink_bps=RATE), 0)
    role = f"{CONDUCTOR}a up"
    assert role in node.roles()
    node.handle(ev.RoleWon(role=role), 0)
    assert node.card().conducts == ("a up",)
    orders = node.handle(sent("j", 500 * MB), 0)
    assert set_rates(orders) == {"j": RATE}
    assert not any(isinstance(order, Tell) for order in orders)
    # The node's GPUs are taken back: what it keeps for others has to leave in time.
    node.handle(ev.ReclaimAsked(request="r"), SECOND)
    assert node.concert.outbound.sending(SECOND)[0].deadline == 21 * SECOND
    node.handle(ev.RoleLost(role=role), 2 * SECOND)
    assert node.card().conducts == ()
    assert node.handle(sent("j", 400 * MB), 9 * SECOND) is not None


def test_another_nodes_conductor_is_told_and_its_word_is_kept() -> None:
    plan = parse_topology(
        '[buildings.p]\nuplink = "1G"\n'
        '[nodes.a]\nbuilding = "p"\nuplink = "1G"\n[nodes.b]\nbuilding = "p"\nuplink = "1G"\n',
        file="t",
    )
    a = lent(Body(node=A, topology=plan), 0)
    b = lent(Body(node=B, topology=plan), 0)
    b.handle(ev.RoleWon(role=f"{CONDUCTOR}building p"), 0)
    a.handle(ev.BeatHeard(card=b.card()), 0)
    (tell,) = [o for o in a.handle(sent("j", 500 * MB), 0) if isinstance(o, Tell)]
    assert tell.to == B
    (answer,) = [o for o in b.handle(tell.event, 0) if isinstance(o, Tell)]
    assert answer.to == A
    assert isinstance(answer.event, ev.PacesTold)
    a.handle(answer.event, 0)
    assert a.concert.outbound.sending(0)[0].planned_by == B
    # Looks of one moment are told together, with the last of them.
    first = replace(sent("i", 300 * MB), more=True)
    assert not [o for o in a.handle(first, SECOND) if isinstance(o, Tell)]
    (tell,) = [o for o in a.handle(sent("j", 400 * MB), SECOND) if isinstance(o, Tell)]
    assert isinstance(tell.event, ev.TransfersTold)
    assert [(t.id, t.left) for t in tell.event.transfers] == [("i", 300 * MB), ("j", 400 * MB)]


def test_a_card_of_an_older_node_conducts_nothing() -> None:
    assert Card(node=A).conducts == ()
    assert Card(node=A).sending == ()


# --- placement -----------------------------------------------------------------------------


def talker(job: str, talk_ms: int) -> Rhythm:
    burst = Burst(start=(300 - talk_ms) * MILLISECOND, length=talk_ms * MILLISECOND, demand=RATE)
    return Rhythm(
        job=JobId(job), period=300 * MILLISECOND, bursts=(burst,), links=(LinkId("b up"),)
    )


def test_a_destination_where_the_rhythm_does_not_fit_loses() -> None:
    """Two nodes alike, but for what is said on their uplinks."""

    def card(node: NodeId, *talks: int) -> Card:
        link = Link(id=LinkId(f"{node} up"), rate=RATE)
        there = [
            replace(talker(f"{node}{n}", talk), links=(link.id,)) for n, talk in enumerate(talks)
        ]
        return Card(
            node=node,
            beat=1,
            gpus=(Gpu(id=GpuId(f"g{node}"), index=0),),
            vacant=(GpuId(f"g{node}"),),
            links=view(rotate(there, [link]), [link]) if there else (),
        )

    around = Neighbourhood(A, LIVELY)
    record = JobRecord(
        id=JobId("j"), spec=JobSpec(name="j", user="u", command=("true",)), submitted_at=0
    )
    around.heard(card(B, 140, 140), 0)
    around.heard(card(C, 60), 0)
    need = Need(job=record.id, shape=shape_of(record.spec))
    # Without a rhythm of its own they are alike, and the name decides.
    assert MOST_USEFUL(need, around.candidates(record, 0), 0).nodes == (B, C)
    around.rhythms[record.id] = talker("j", 100)
    slow = {c.card.node: c.slowdown for c in around.candidates(record, 0)}
    assert slow[B] > 1.02
    assert slow[C] == pytest.approx(1.0, abs=0.02)
    ranked = MOST_USEFUL(need, around.candidates(record, 0), 0)
    assert ranked.nodes == (C, B)
    assert any("its rhythm costs" in reason for reason in ranked.decision.reasons)


def test_old_news_told_again_does_not_make_a_link_slow() -> None:
    node = outbound()
    node.sent(sent("j", 500 * MB), 0)
    node.tell(0)
    assert set_rates(node.hold(0)) == {"j": RATE}
    for second in range(1, 5):
        assert set_rates(node.hold(second * SECOND)) == {}


def test_what_seems_too_late_goes_on_where_it_is_in_nobodys_way() -> None:
    convoy = Convoy([LINK], least_rate_first)
    convoy.told(A, [transfer("x", 5000 * MB, 10 * SECOND)], 0)
    assert rates(convoy, 0) == {"x": RATE}
    convoy.told(B, [transfer("y", 500 * MB, 10 * SECOND)], 0)
    assert "x" not in rates(convoy, 0)


def test_a_jobs_older_state_makes_way_for_its_newer_one() -> None:
    node = Outbound(
        A,
        uplink=Link(id=LinkId("a up"), rate=RATE),
        topology=None,
        policy=least_rate_first,
        stakes=lambda job, now: Stakes(deadline=10 * SECOND, unsaved=1000),
        conducts=lambda node, stretch, now: False,
    )
    older = replace(sent("older", 300 * MB), job=JobId("j"))
    newer = replace(sent("newer", 800 * MB, to=C), job=JobId("j"))
    node.sent(older, 0)
    node.sent(newer, 0)
    node.tell(0)
    # Both take eleven seconds, there are ten: the older one has less to go, and is worth nothing.
    assert set_rates(node.hold(0)) == {"newer": RATE, "older": TRICKLE}
    node.sent(replace(newer, left=600 * MB), 0)
    node.tell(0)
    assert set_rates(node.hold(0))["older"] > TRICKLE
