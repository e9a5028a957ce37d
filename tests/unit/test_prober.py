"""One search: a bounded walk from node to node."""

from reclaimnet.engine.desk import MAX_PROBES
from reclaimnet.engine.prober import PATIENCE, Prober
from reclaimnet.model.events import ProbeAnswered, ProbeArrived
from reclaimnet.model.market import GpuId, JobId, NodeId
from reclaimnet.model.orders import Tell
from reclaimnet.model.probing import Purpose, Ticket, TicketId
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import Shape

J = JobId("j")


def prober(*nodes: str) -> Prober:
    return Prober(
        asker=NodeId("me"),
        job=J,
        shape=Shape(gpus=1),
        purpose=Purpose.START,
        priority=0,
        ranked=tuple(NodeId(node) for node in nodes),
    )


def refuse(search: Prober, orders: list, now: int, *hints: str) -> list:
    [tell] = orders
    assert isinstance(tell, Tell)
    assert isinstance(tell.event, ProbeArrived)
    answer = ProbeAnswered(
        probe=tell.event.probe.id,
        node=tell.to,
        reasons=("full",),
        hints=tuple(NodeId(hint) for hint in hints),
    )
    return search.answered(answer, now)


def test_a_refusal_leads_to_whom_it_names() -> None:
    search = prober("a")
    orders = refuse(search, search.ask_next(0), 1, "b")
    assert orders[0].to == "b"
    refuse(search, orders, 2, "a")
    assert search.done, "nobody is asked twice"
    assert search.refused == ["a: full", "b: full"]


def test_hints_do_not_lift_the_bound() -> None:
    search = prober("a")
    orders = search.ask_next(0)
    asked = 0
    while orders:
        asked += 1
        orders = refuse(search, orders, asked, f"x{asked}", f"y{asked}", f"z{asked}")
    assert asked == MAX_PROBES
    assert search.done


def test_silence_is_an_answer_after_a_while() -> None:
    search = prober("a", "b")
    search.ask_next(0)
    assert search.woke(PATIENCE - 1) == []
    assert search.woke(PATIENCE)[0].to == "b"
    assert search.silent == ["a"]


def test_a_ticket_ends_the_search() -> None:
    search = prober("a", "b")
    [tell] = search.ask_next(0)
    ticket = Ticket(
        id=TicketId("t"), node=NodeId("a"), job=J, gpus=(GpuId("g"),), expires=5 * SECOND
    )
    answer = ProbeAnswered(probe=tell.event.probe.id, node=NodeId("a"), ticket=ticket)
    assert search.answered(answer, 1) == []
    assert search.done
    assert search.tickets == [ticket]


def gang_search(*nodes: str) -> Prober:
    return Prober(
        asker=NodeId("me"),
        job=JobId("j"),
        shape=Shape(gpus=1),
        purpose=Purpose.START,
        priority=0,
        ranked=tuple(NodeId(node) for node in nodes),
        wanted=len(nodes),
    )


def asked(orders: list) -> list[str]:
    return [order.to for order in orders]


def ticket_of(search: Prober, node: str) -> ProbeAnswered:
    ticket = Ticket(
        id=TicketId(node), node=NodeId(node), job=search.job, gpus=(GpuId("g"),), expires=9
    )
    assert search.asking is not None
    return ProbeAnswered(probe=search.asking, node=NodeId(node), ticket=ticket)


def test_a_gang_asks_its_nodes_in_the_rank_of_their_names_until_it_has_all() -> None:
    search = gang_search("c", "a", "b")
    assert asked(search.ask_next(0)) == ["a"]
    assert asked(search.answered(ticket_of(search, "a"), 1)) == ["b"]
    assert asked(search.answered(ticket_of(search, "b"), 2)) == ["c"]
    assert not search.done
    assert search.answered(ticket_of(search, "c"), 3) == []
    assert search.done
    assert search.found
    assert [ticket.node for ticket in search.tickets] == ["a", "b", "c"]


def test_the_first_refusal_ends_a_gangs_search_whatever_hints_come_with_it() -> None:
    search = gang_search("a", "b", "c")
    search.ask_next(0)
    search.answered(ticket_of(search, "a"), 1)
    assert search.asking is not None
    refusal = ProbeAnswered(
        probe=search.asking, node=NodeId("b"), reasons=("full",), hints=(NodeId("z"),)
    )
    assert search.answered(refusal, 2) == []
    assert search.done
    assert not search.found
    assert [ticket.node for ticket in search.tickets] == ["a"], "to be given back"


def test_silence_ends_a_gangs_search_too() -> None:
    search = gang_search("a", "b")
    search.ask_next(0)
    assert search.woke(search.next_wake()) == []
    assert search.done
    assert search.silent == ["a"]
