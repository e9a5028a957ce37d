"""What people type around a running campus: rehearse, watch, down; and agents that come and go."""

import json
import select
import subprocess
import sys
from pathlib import Path

import pytest
from tests.live.campus import LiveCampus
from tests.live.waiting import WAIT_S, until

from reclaimnet.apps.client import ask_local
from reclaimnet.errors import Unavailable
from reclaimnet.model.asking import StatusRequest
from reclaimnet.model.work import JobState


@pytest.fixture
def campus(tmp_path: Path):
    live = LiveCampus(tmp_path)
    try:
        yield live
    finally:
        live.close()


def test_a_rehearsal_moves_the_job_and_gives_the_gpu_back(campus: LiveCampus) -> None:
    campus.start("lab", "office", gpus=2)
    job = campus.train(padding_mib=1)
    campus.await_saved(job, holders=2)
    source = campus.job(job).holder
    assert source is not None
    assert campus.rn("rehearse", "train", check=False).returncode == 2
    assert campus.job(job).epoch == 1
    watching = subprocess.Popen(
        [sys.executable, "-m", "reclaimnet.apps.cli", "watch", "--every", "200ms"],
        env=campus.env,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert watching.stdout is not None
        # It tells only what changes after its first look.
        for _ in range(round(WAIT_S)):
            bell = campus.gateway.submit({"name": "bell", "command": ["true"]})
            campus.gateway.cancel(bell.id)
            if select.select([watching.stdout], [], [], 1.0)[0]:
                break
        done = campus.rn("rehearse", "train", "--notice", "12s", "-y", "--json")
        outcome = json.loads(done.stdout)["outcome"]
        assert outcome["source"] == source
        assert outcome["destination"] in campus.others(source)
        assert (outcome["steps_lost"], outcome["lent_again"]) == (0, True)
        assert outcome["downtime_s"] > 0
        assert "may go to" in done.stderr
        until(lambda: len(campus[source].card().gpus) == 2, "it lends as before")
        said = iter(watching.stdout.readline, "")
        assert any(f"RUNNING on {outcome['destination']}" in line for line in said)
    finally:
        watching.terminate()
        watching.communicate()
    campus.gateway.cancel(job)
    until(lambda: campus.job(job).state.terminal, "it is over")
    refused = campus.rn("rehearse", str(job), "-y", check=False)
    assert "only a running job" in refused.stderr


def test_down_names_the_jobs_it_stops_and_forgets_the_agents_it_ends(campus: LiveCampus) -> None:
    campus.rn("up", "--gateway-port", "0")
    for name in ("lab", "office"):
        campus.rn("agent", "--name", name, "--gpus", "1", "--lend", "--detach")
    saved, plain = campus.train(), campus.submit(["-c", "import time; time.sleep(600)"])
    for job in (saved, plain):
        campus.await_running(job)
    waiting = campus.train()
    until(lambda: campus.job(saved).newest is not None, "it is saved")
    ended = campus.rn("down").stderr
    assert "Ended agent lab, agent office, the campus." in ended
    assert f"Saved, and go on after the next `rn up`: train ({saved})." in ended
    assert f"since they were never saved: train ({plain})." in ended
    assert f"Go on waiting after the next `rn up`: train ({waiting})." in ended
    lab, office = (f"rn agent --name {name} --gpus 1 --detach" for name in ("lab", "office"))
    assert f"each as before: {lab}; {office}\n" in ended
    again = campus.rn("up", "--gateway-port", "0").stderr
    assert f"before:   {lab}\n" in again
    # They said goodbye, so nobody misses them; their jobs wait for a place, and nothing was
    # started in the one that another gave back.
    assert campus.gateway.nodes() == []
    jobs = {job.id: (job.state, job.epoch) for job in campus.gateway.jobs(ended=False)}
    pending = JobState.PENDING
    assert jobs == {saved: (pending, 1), plain: (pending, 1), waiting: (pending, 0)}
    campus.rn(*lab.split()[1:])
    until(lambda: any(node.card.gpus for node in campus.gateway.nodes()), "as printed, it lends")


def test_down_has_jobs_saved_and_they_go_on_without_a_step_lost(campus: LiveCampus) -> None:
    campus.rn("up", "--gateway-port", "0")
    for name in ("lab", "office"):
        campus.rn("agent", "--name", name, "--gpus", "1", "--lend", "--detach")
    job = campus.train(save_every=0)
    campus.await_running(job)
    campus.await_steps(20, epoch=1)
    ended = campus.rn("down").stderr
    assert "Asking 1 job here for a last save, for up to 20 s (Ctrl-C ends the wait).\n" in ended
    assert "Ended agent lab, agent office, the campus." in ended
    assert f"Saved, and go on after the next `rn up`: train ({job}).\n" in ended
    stopped_at = campus.last_step(1)
    campus.rn("up", "--gateway-port", "0")
    for name in ("lab", "office"):
        campus.rn("agent", "--name", name, "--gpus", "1", "--detach")
    record = campus.await_running(job, epoch=2)
    campus.await_steps(3, epoch=record.epoch)
    assert record.steps_lost == 0
    first = next(entry for entry in campus.ledger() if entry.epoch == record.epoch)
    assert (record.epoch, first.step) == (2, stopped_at + 1)
    campus.counted()


def test_down_now_asks_for_no_save(campus: LiveCampus) -> None:
    campus.rn("up", "--gateway-port", "0")
    campus.rn("agent", "--name", "lab", "--gpus", "1", "--lend", "--detach")
    job = campus.train()
    before = campus.await_saved(job, step=10)
    ended = campus.rn("down", "--now").stderr
    assert "last save" not in ended
    assert f"Go on from their last checkpoint after the next `rn up`: train ({job})." in ended
    assert before.newest is not None


def test_an_agents_door_is_open_before_the_campus_is_there(campus: LiveCampus) -> None:
    campus.rn("up", "--gateway-port", "0")
    campus.rn("agent", "--name", "lab", "--gpus", "1", "--detach")
    token = (campus.config.state / "join-token").read_text().strip()
    (campus.home / "token").write_text(token)
    url = campus.nats_url
    campus.rn("down")
    argv = [sys.executable, "-m", "reclaimnet.apps.cli", "agent", "--name", "lab", "--gpus", "1"]
    argv += ["--join", url, "--token-file", str(campus.home / "token")]
    agent = subprocess.Popen(argv, env=campus.env, stderr=subprocess.DEVNULL)
    try:

        def says_why() -> bool:
            try:
                reply = ask_local(campus.config, "lab", StatusRequest())
            except Unavailable:
                return False
            assert not reply.ok
            return "has not reached the campus" in reply.text

        until(says_why, "the door is open")
        campus.rn("up", "--gateway-port", "0")
        until(lambda: ask_local(campus.config, "lab", StatusRequest()).ok, "it has joined")
    finally:
        agent.terminate()
        agent.wait(WAIT_S)


def test_a_campus_in_another_place_leaves_the_first_where_commands_find_it(
    campus: LiveCampus, tmp_path: Path
) -> None:
    campus.start("lab")
    file = campus.home / "config" / "reclaimnet" / "config.toml"
    remembered = file.read_bytes()
    other = ["--state", str(tmp_path / "other")]
    campus.rn(*other, "up", "--gateway-port", "0")
    try:
        assert file.read_bytes() == remembered
        until(lambda: campus.rn("nodes").stdout.startswith("lab"), "the first is found")
        assert campus.rn(*other, "nodes").stdout == ""
    finally:
        ended = campus.rn(*other, "down")
    assert "Ended the campus." in ended.stderr
    assert campus.rn("nodes").stdout.startswith("lab")
