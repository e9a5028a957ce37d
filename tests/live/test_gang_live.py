"""Gangs on a real campus: processes that know each other, saved at one step, replaced together."""

import getpass
import json
import re
import sys
from pathlib import Path

import pytest
from tests.live.campus import LiveCampus, live_campus
from tests.live.waiting import until

from reclaimnet.apps import bundle
from reclaimnet.model.market import JobId, NodeId, Progress
from reclaimnet.model.work import JobState

pytestmark = pytest.mark.needs("nats")

MEMBER = '''\
"""Every step needs all ranks: rank 0 listens where it was told to, the others meet it there."""

import os
import socket
import sys
import time

from reclaimnet import sdk

rank, size = int(os.environ["RN_RANK"]), int(os.environ["RN_WORLD_SIZE"])
there = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
steps = int(sys.argv[1])


def meet():
    if rank == 0:
        with socket.create_server(there) as server:
            return [server.accept()[0] for _ in range(size - 1)]
    while True:
        try:
            return [socket.create_connection(there)]
        except OSError:
            time.sleep(0.05)


with sdk.job() as job:
    state = job.restore({"step": 0, "rank": rank})
    assert state["rank"] == rank, "another rank's state"
    peers = meet()
    print(f"rank {rank} of {size} from step {state['step']}")
    while state["step"] < steps:
        time.sleep(0.02)
        for peer in peers:
            peer.sendall(b"%8d" % state["step"])
        for peer in peers:
            assert int(peer.recv(8, socket.MSG_WAITALL)) == state["step"], "ranks differ in step"
        state["step"] += 1
        job.step(state["step"], state)
print(f"rank {rank} is done")
'''


def submit(campus: LiveCampus, *, nodes: int, steps: int) -> JobId:
    (campus.work / "member.py").write_text(MEMBER)
    fields = {
        "name": "gang",
        "user": getpass.getuser(),
        "command": [sys.executable, "member.py", str(steps)],
        "nodes": nodes,
        "bundle": campus.gateway.ship(bundle.pack(campus.work)),
    }
    return campus.gateway.submit(fields).id


def test_a_gang_meets_moves_together_and_completes(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start("a", "b", "c")
        job = submit(campus, nodes=2, steps=600)
        running = campus.await_running(job)
        assert len(set(running.seats)) == 2
        campus[str(running.seats[1])].reclaim(grace_s=20)
        moved = campus.await_running(job, epoch=2)
        assert running.seats[1] not in moved.seats
        ended = campus.await_job(job, lambda r: r.state.terminal, "it ends")
        assert (ended.state, ended.moves, ended.steps_lost) == (JobState.COMPLETED, 1, 0)
        # It may have been saved again before we saw that it had moved.
        shards = {checkpoint.step: len(checkpoint.shards) for checkpoint in moved.checkpoints}
        begun = re.findall(r"rank (\d) of 2 from step (\d+)", campus.log(job))
        [step] = {int(step) for _, step in begun if step != "0"}
        assert sorted(rank for rank, at in begun if int(at) == step) == ["0", "1"]
        assert shards[step] == 2


def test_a_gang_that_does_not_fit_starts_nothing_and_says_why(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start("a", "b")
        job = submit(campus, nodes=3, steps=10)
        waits = campus.await_job(job, lambda r: "3 nodes" in r.reason, "it is told why")
        assert waits.state is JobState.PENDING
        assert not campus["a"].guests()
        assert not campus["b"].guests()
        campus.add("c")
        ended = campus.await_job(job, lambda r: r.state.terminal, "it ends")
        assert ended.state is JobState.COMPLETED


def test_a_gang_practises_a_reclaim_and_each_node_tells_of_its_member(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start("a", "b", "c")
        job = submit(campus, nodes=2, steps=1_000_000)
        running = campus.await_running(job)
        campus.await_saved(job)
        for node in running.seats:
            told = until(lambda node=node: told_of(campus, node, job), f"{node} tells of it")
            assert told.gpus == tuple(gpu.id for gpu in campus[str(node)].card().gpus)
        spare = ({"a", "b", "c"} - set(running.seats)).pop()
        done = campus.rn("rehearse", job, "--notice", "15s", "-y", "--json")
        outcome = json.loads(done.stdout)["outcome"]
        assert (outcome["source"], outcome["destination"]) == (running.holder, spare)
        assert outcome["lent_again"]
        campus.gateway.cancel(job)
        campus.await_job(job, lambda r: r.state.terminal, "it is cancelled")


def told_of(campus: LiveCampus, node: NodeId, job: JobId) -> Progress | None:
    """What a node's card says of a job."""
    cards = [seen.card for seen in campus.gateway.nodes() if seen.card.node == node]
    return next((each for card in cards for each in card.jobs if each.job == job), None)
