"""The demo: the whole real system on this machine for a minute, and proof that nothing was lost.

NATS, gateway and four agents are started as a user would start them; three training jobs learn
while owners take their machines back. At the end each job's model is compared, bit for bit, with
that of an undisturbed run.
"""

import contextlib
import dataclasses
import functools
import json as jsonlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from reclaimnet.adapters.linux.attempts.start import kept_environment
from reclaimnet.apps import bundle, printing, up
from reclaimnet.apps.client import Gateway, Node
from reclaimnet.apps.config import Config, load
from reclaimnet.apps.own_command import finish, rn, to_the_end
from reclaimnet.errors import ReclaimNetError, Unavailable, UsageError
from reclaimnet.model.asking import LendRequest, ReclaimRequest, WithdrawRequest
from reclaimnet.model.market import JobId
from reclaimnet.model.units import SECOND, show_duration
from reclaimnet.model.work import JobRecord, JobState, show_loss

if TYPE_CHECKING:
    from reclaimnet.adapters.linux.testbed import Testbed

AGENTS: Final = ("maple", "birch", "cedar", "aspen")
GPUS: Final = 2
STEPS: Final = 300
LONG_STEPS: Final = 1_000_000
"""Of the jobs that are left running: more than a day."""
STEP_DELAY: Final = "0.1"
PREFIX: Final = "reclaimnet-demo-"
KEPT: Final = "kept"
"""A file in the folder of a demo that goes on after its command."""
PATIENCE_S: Final = 85.0
REFRESH_S: Final = 0.25
EVENTS_SHOWN: Final = 9
_DONE: Final = re.compile(rb"done: .* ([0-9a-f]{16})\s*$", re.MULTILINE)

TRAIN: Final = '''\
"""Three layers that learn a function, ten lines of which are ReclaimNet's business."""

import hashlib
import sys
import time

import numpy as np

from reclaimnet import sdk

seed, steps, delay = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
start = np.random.default_rng(seed)
first = {
    "w1": start.normal(0, 0.3, (16, 64)),
    "w2": start.normal(0, 0.1, 64),
    "rng": start.bit_generator.state,
    "step": 0,
}
teacher = np.random.default_rng(7).normal(0, 0.25, 16)

with sdk.job() as job:
    state = job.restore(first)
    rng = np.random.default_rng()
    rng.bit_generator.state = state["rng"]
    while state["step"] < steps:
        x = rng.normal(size=(128, 16))
        hidden = np.tanh(x @ state["w1"])
        error = hidden @ state["w2"] - np.sin(x @ teacher)
        back = np.outer(error, state["w2"]) * (1 - hidden**2) / 128
        state["w2"] -= 0.1 * (hidden.T @ error) / 128
        state["w1"] -= 0.1 * (x.T @ back)
        state["rng"] = rng.bit_generator.state
        state["step"] += 1
        time.sleep(delay)
        job.step(state["step"], state)
        if state["step"] % 50 == 0:
            print(f"step {state['step']}: loss {np.mean(error**2):.4f}", flush=True)

model = hashlib.sha256(state["w1"].tobytes() + state["w2"].tobytes()).hexdigest()[:16]
print(f"done: loss {np.mean(error**2):.4f} {model}", flush=True)
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One job's line in the final table."""

    name: str
    steps: int
    moves: int
    steps_lost: int
    downtime_s: float
    identical: bool


def main(*, json: bool, keep: bool, testbed: bool) -> int:
    if testbed and keep:
        raise UsageError("--keep and --testbed exclude each other; choose one")
    console = Console(stderr=True)
    home = Path(tempfile.mkdtemp(prefix=PREFIX))
    env = _env(home)
    began = time.monotonic()
    kept = False
    with to_the_end():
        try:
            if testbed:
                with _namespaces(home) as bed:
                    rows = _run(console, home, env, bed)
                    _clean_up(home, env)
            else:
                rows = _run(console, home, env, None)
            kept = keep
        finally:
            if not kept:
                _clean_up(home, env)
    if json:
        print(jsonlib.dumps({"jobs": [dataclasses.asdict(row) for row in rows]}))  # noqa: T201
    else:
        _show(rows, time.monotonic() - began)
    if kept:
        (home / KEPT).touch()
        config = load(env=env, project=home / "none.toml", system=home / "none.toml")
        _settle(Gateway(config), home / "work")
        console.print(
            "It is still running, with two new jobs. Take a machine back under `My machines`:",
            f"  {_link(config)}",
            "To look around in another shell:",
            f"  export XDG_STATE_HOME={home}/state XDG_CONFIG_HOME={home}/config",
            f"  rn ps -a; rn nodes; rn why {rows[0].name}",
            "`rn demo --end` ends it, in any shell, and removes all of it.",
            sep="\n",
            highlight=False,
            soft_wrap=True,
        )
    return 0 if all(row.identical for row in rows) and len(rows) == 3 else 1


def end() -> list[str]:
    """End every demo of ours that was kept; the folders that were removed."""
    removed = []
    for mark in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{KEPT}")):
        # Anybody may make such a folder where all keep theirs.
        if mark.parent.lstat().st_uid == os.getuid():
            _clean_up(mark.parent, _env(mark.parent))
            removed.append(str(mark.parent))
    return removed


def _env(home: Path) -> dict[str, str]:
    """That of a person whose only campus is the one in `home`."""
    env = {name: text for name, text in os.environ.items() if not name.startswith("RECLAIMNET_")}
    return {**env, "XDG_STATE_HOME": str(home / "state"), "XDG_CONFIG_HOME": str(home / "config")}


@contextlib.contextmanager
def _namespaces(home: Path) -> Iterator["Testbed"]:
    """Four hosts in two racks, each with a lane for guests and a guard (root)."""
    from reclaimnet.apps import testbed

    racks = [{"name": name, "hosts": 2, "uplink": "1gbit"} for name in ("lab", "office")]
    mark = home.name[-6:].replace("_", "x").lower()
    table: dict[str, object] = {"mark": mark, "management": True, "rack": racks}
    table["network"] = testbed.own_network()
    with testbed.running(testbed.parse_config(table)) as bed:
        yield bed


def _start_on_hosts(env: dict[str, str], bed: "Testbed") -> None:
    from reclaimnet.apps import testbed

    state = Path(env["XDG_STATE_HOME"]) / "reclaimnet"
    campus = jsonlib.loads((state / "campus.json").read_text())
    for host in bed.hosts:
        testbed.run_agent(
            bed,
            host,
            nats_url=campus["nats_url"],
            nats_token=campus["nats_token"],
            gpus=GPUS,
            env=env,
        )


def _run(console: Console, home: Path, env: dict[str, str], bed: "Testbed | None") -> list[Row]:
    work = home / "work"
    work.mkdir()
    (work / "train.py").write_text(TRAIN)
    with console.status("starting NATS, a gateway and four agents"):
        if bed is not None:
            listen = ("--listen", str(bed.address))
            _all_at_once([functools.partial(_rn, env, "up", "--gateway-port", "0", *listen)])
            _start_on_hosts(env, bed)
        else:
            _all_at_once([functools.partial(_rn, env, "up", "--gateway-port", "0")])
            _all_at_once([functools.partial(_start_agent, env, name) for name in AGENTS])
    config = load(env=env, project=home / "none.toml", system=home / "none.toml")
    gateway = Gateway(config)
    _await(lambda: sum(len(node.card.vacant) for node in gateway.nodes()) >= 6, "the agents")
    console.print("Watch it:", _link(config), highlight=False, soft_wrap=True)
    shipped = gateway.ship(bundle.pack(work))
    names = ("vision", "speech", "protein")
    records = [
        gateway.submit(
            {
                "name": name,
                "user": "demo",
                "command": [sys.executable, "train.py", str(seed), str(STEPS), STEP_DELAY],
                "gpus": 1,
                "bundle": shipped,
            }
        )
        for seed, name in enumerate(names)
    ]
    jobs = [record.id for record in records]
    story = _Story(gateway, jobs)
    with _undisturbed(work, len(names)) as undisturbed:
        with _shown(console, story):
            story.play()
        models = [model() for model in undisturbed]
    return [_row(gateway, gateway.job(job), models[index]) for index, job in enumerate(jobs)]


def _link(config: Config) -> str:
    return up.page_link(str(config.gateway_url), str(config.gateway_token))


def _settle(gateway: Gateway, work: Path) -> None:
    """Everything is lent again, and there is something to take it back from."""
    for node in gateway.nodes():
        if not node.card.gpus or node.card.leaving:
            # A notice may have run out since, or hold on to what was lent: either is refused.
            for request in (WithdrawRequest(), LendRequest(notice=20 * SECOND)):
                with contextlib.suppress(ReclaimNetError):
                    gateway.ask(node.card.node, request)
    shipped = gateway.ship(bundle.pack(work))
    for seed, name in enumerate(("night-one", "night-two"), start=7):
        command = [sys.executable, "train.py", str(seed), str(LONG_STEPS), STEP_DELAY]
        gateway.submit({"name": name, "user": "demo", "command": command, "bundle": shipped})


class _Story:
    """Owners come and go while the jobs run."""

    def __init__(self, gateway: Gateway, jobs: list[JobId]) -> None:
        self.gateway = gateway
        self.jobs = jobs
        self.lines: list[str] = []
        self.tell: Callable[[str], None] = lambda line: None
        self.records: list[JobRecord] = []
        self.nodes: list[Node] = []

    def play(self) -> None:
        self._wait_for(60)
        first = self._home_of(0)
        self._reclaim(first, notice=15, why="its owner has a deadline")
        self._wait_for(130, moved=1)
        second = self._home_of(1)
        if second != first:
            self._lend(first)
        self._reclaim(second, notice=10, why="its owner is back from lunch")
        self._wait_for(180, moved=2)
        third = self._home_of(2)
        self._reclaim(third, notice=20, why="its owner starts an own run")
        self._wait(lambda: all(record.state.terminal for record in self.records), "the jobs to end")

    def refresh(self) -> None:
        self.records = [self.gateway.job(job) for job in self.jobs]
        self.nodes = self.gateway.nodes()

    def _wait_for(self, step: int, moved: int = 0) -> None:
        def there() -> bool:
            least = min(record.step for record in self.records if not record.state.terminal)
            return least >= step and sum(record.moves for record in self.records) >= moved

        self._wait(lambda: self._over() or there(), f"step {step}")

    def _over(self) -> bool:
        return all(record.state.terminal for record in self.records)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while True:
            self.refresh()
            if condition():
                return
            if time.monotonic() > until:
                raise Unavailable(f"the demo waited {PATIENCE_S:.0f} s for {what} in vain")
            time.sleep(REFRESH_S)

    def _home_of(self, index: int) -> str:
        self._wait(
            lambda: self._over() or self.records[index].state == JobState.RUNNING, "a running job"
        )
        return self.records[index].holder or str(self.nodes[index].card.node)

    def _reclaim(self, node: str, *, notice: int, why: str) -> None:
        request = ReclaimRequest(grace=notice * SECOND, reason=why)
        reply = self.gateway.ask(node, request)
        self._note(f"[bold]{node}[/] is taken back: {why}. {reply.text}")

    def _lend(self, node: str) -> None:
        self._wait(lambda: self._is_free(node), f"{node} to be free")
        reply = self.gateway.ask(node, LendRequest(notice=20 * SECOND))
        self._note(f"[bold]{node}[/] is idle again. {reply.text}")

    def _note(self, line: str) -> None:
        self.lines.append(line)
        self.tell(line)

    def _is_free(self, node: str) -> bool:
        return any(seen.card.node == node and not seen.card.gpus for seen in self.nodes)


# --- what is shown ---------------------------------------------------------------------------


@contextlib.contextmanager
def _shown(console: Console, story: _Story) -> Iterator[None]:
    """A live picture on a terminal; a few lines otherwise."""
    if not console.is_terminal:
        story.tell = console.print
        yield
        return
    stop = threading.Event()
    with Live(console=console, refresh_per_second=8, transient=True) as live:

        def draw() -> None:
            while not stop.wait(REFRESH_S):
                live.update(_picture(story))

        drawer = threading.Thread(target=draw, name="demo-picture")
        drawer.start()
        try:
            yield
        finally:
            stop.set()
            drawer.join()


def _picture(story: _Story) -> Group:
    bars = Progress(
        TextColumn("{task.description:<9}"),
        BarColumn(bar_width=40),
        TextColumn("{task.fields[where]}"),
    )
    for record in story.records:
        where = f"{record.state} on {record.holder}" if record.holder else str(record.state)
        if record.moves:
            where += f", moved {record.moves}x, {show_loss(record)}"
        bars.add_task(record.spec.name, total=STEPS, completed=record.step, where=where)
    nodes = Table.grid(padding=(0, 2))
    for seen in story.nodes:
        card = seen.card
        cells = ["□" if gpu.id in card.vacant else "■" for gpu in card.gpus] or ["-"]
        guests = " ".join(progress.job for progress in card.jobs)
        nodes.add_row(Text(card.node, style="bold"), "".join(cells), str(seen.state), guests)
    happened = [Text.from_markup(line) for line in story.lines[-EVENTS_SHOWN:]]
    return Group(bars, Text(), nodes, Text(), *happened)


def _show(rows: list[Row], took_s: float) -> None:
    table = Table(title=f"Three jobs, three reclaims, {took_s:.0f} s")
    for title in ("job", "steps", "moves", "steps lost", "downtime", "same model as undisturbed"):
        table.add_column(title, justify="left" if title == "job" else "right")
    for row in rows:
        table.add_row(
            row.name,
            str(row.steps),
            str(row.moves),
            str(row.steps_lost),
            show_duration(round(row.downtime_s * SECOND)),
            "[green]yes, bit for bit[/]" if row.identical else "[red]no[/]",
        )
    printing.console().print(table)


# --- the parts -------------------------------------------------------------------------------


def _row(gateway: Gateway, record: JobRecord, undisturbed: str) -> Row:
    log = b"".join(gateway.logs(record.id))
    found = _DONE.search(log)
    model = found[1].decode() if found else "none"
    return Row(
        name=record.spec.name,
        steps=record.step,
        moves=record.moves,
        steps_lost=record.steps_lost,
        downtime_s=round(record.downtime / SECOND, 3),
        identical=record.state == JobState.COMPLETED and model == undisturbed,
    )


@contextlib.contextmanager
def _undisturbed(work: Path, count: int) -> Iterator[list[Callable[[], str]]]:
    """The same script outside of ReclaimNet, without pauses; each callable waits for its model.

    It sees no more of the environment than a job does: a variable by which a numeric library
    chooses its kernels would change the last bits."""
    plain = {**kept_environment(), "PYTHONPATH": str(Path(up.__file__).resolve().parents[2])}
    children: list[subprocess.Popen[bytes]] = []

    def model(child: "subprocess.Popen[bytes]") -> str:
        output, _ = child.communicate(timeout=PATIENCE_S)
        found = _DONE.search(output)
        if found is None:
            raise Unavailable("the undisturbed run did not end well; is numpy installed?")
        return found[1].decode()

    try:
        with _unheard():
            for seed in range(count):
                child = subprocess.Popen(
                    [sys.executable, "train.py", str(seed), str(STEPS), "0"],
                    cwd=work,
                    env=plain,
                    stdout=subprocess.PIPE,
                    # Ctrl-C is for us; we end them.
                    start_new_session=True,
                )
                children.append(child)
        yield [functools.partial(model, child) for child in children]
    finally:
        # Whoever cannot wait must not keep us from ending all of them.
        with _unheard():
            for child in children:
                child.kill()
                child.communicate()


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Whoever ends us is heard a moment later: a child that is being started would be lost."""
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    )
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_agent(env: dict[str, str], name: str) -> None:
    _rn(env, "agent", "--name", name, "--gpus", str(GPUS), "--lend", "--notice", "20s", "--detach")


def _rn(env: dict[str, str], *arguments: str) -> None:
    finish(rn(*arguments), f"rn {arguments[0]}", env=env, patience_s=PATIENCE_S)


def _all_at_once(actions: list[Callable[[], None]]) -> None:
    errors: list[ReclaimNetError] = []

    def act(action: Callable[[], None]) -> None:
        try:
            action()
        except ReclaimNetError as error:
            errors.append(error)

    threads = [threading.Thread(target=act, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        # Interrupted or not: what is being started can be ended only once it has started.
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def _await(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until:
            raise Unavailable(f"{what} did not come up")
        time.sleep(REFRESH_S)


def _clean_up(home: Path, env: dict[str, str]) -> None:
    """Nothing stays behind, however this ends."""
    config: Config = load(env=env, project=home / "none.toml", system=home / "none.toml")
    up.end_all(config)
    shutil.rmtree(home, ignore_errors=True)
