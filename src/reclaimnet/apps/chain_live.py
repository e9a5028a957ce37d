"""Behind `rn chain run` and its kin: chains on a real Slurm, begun, looked at and ended."""

import getpass
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from reclaimnet.adapters.slurm.client import Slurm
from reclaimnet.apps import daemon
from reclaimnet.apps.chain_keeper import Keeper
from reclaimnet.apps.chain_kept import begin_folder, kept_state, kept_wish
from reclaimnet.apps.chain_told import ChainTold, Teller, told_of
from reclaimnet.apps.chain_wish import adopted, checked, made_wish, name_of, policy_of
from reclaimnet.apps.config import Config, did_you_mean
from reclaimnet.apps.own_command import rn
from reclaimnet.engine.chain import tally_of
from reclaimnet.errors import BadConfig, NotFound, Unavailable, UsageError
from reclaimnet.model.chain import (
    Handover,
    LinkState,
    Phase,
    Tempo,
)
from reclaimnet.model.supply import Promise
from reclaimnet.model.units import SECOND
from reclaimnet.policy.provision import FAIR_PRICE

POLL_S: Final = 0.25
"""How often a keeper looks into its own folder, whether a person asked for the end."""
READY_S: Final = 30.0
CANCEL_PATIENCE_S: Final = 120.0
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}")

Tell = Callable[[str], None]


def run(*, config: Config, name: str | None, detach: bool, tell: Tell, **wish: Any) -> int:
    """Begin a chain, or take up one that was left; returns when it is over."""
    folder = begin(config=config, name=name, tell=tell, **wish)
    if detach:
        return _detached(config, folder, tell)
    return _kept(config, folder, tell)


def _kept(config: Config, folder: Path, tell: Tell) -> int:
    def told() -> ChainTold:
        now = time.time_ns()
        return told_of(_report(folder, now), user=getpass.getuser(), now=now)

    with Teller(config, folder.name, told):
        return Keeper(folder, _slurm(config), tell).live()


def begin(
    *,
    config: Config,
    command: Sequence[str],
    name: str | None = None,
    limit: int | None = None,
    nodes: int | None = None,
    partition: str | None = None,
    options: Sequence[str] = (),
    handover: str = "service",
    ready_port: int | None = None,
    ready_command: str | None = None,
    ready_file: bool = False,
    save_signal: str = "USR1",
    policy: str | None = None,
    gap_price: float = FAIR_PRICE,
    lead_h: float = 6.0,
    weights: Path | None = None,
    promise: Promise | None = None,
    tempo: Tempo | None = None,
    tell: Tell = lambda text: None,
) -> Path:
    """Write down what is wanted, unless a chain of this name was left unfinished: then that goes
    on. Whoever keeps the folder next submits the first job."""
    name = name or name_of(command)
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot be a chain's name; use letters, digits and dashes")
    folder = config.state / "chains" / name
    slurm = _slurm(config)
    keeper = daemon.running(folder / "keeper.pid")
    if keeper is not None:
        raise UsageError(
            f"the chain {name} is being kept already (pid {keeper.pid}); see `rn chain status`"
        )
    if kept_wish(folder) is not None and not kept_state(folder, name).phase.over:
        if command:
            tell(f"the chain {name} goes on as it was begun; `rn chain cancel {name}` would end it")
        return folder
    if not command:
        raise UsageError(f"there is no chain {name} to go on with; give its command after --")
    wish = made_wish(
        folder,
        command,
        name=name,
        limit=limit,
        nodes=nodes,
        partition=partition,
        options=options,
        handover=Handover(handover),
        ready_port=ready_port,
        ready_command=ready_command,
        ready_file=ready_file,
        save_signal=save_signal,
        policy=policy or ("plan" if weights is None else "forest"),
        gap_price=gap_price,
        lead_h=lead_h,
        weights=weights,
        promise=promise,
        tempo=tempo or Tempo(),
    )
    policy_of(wish)
    begin_folder(folder, adopted(checked(wish, slurm), slurm, tell))
    return folder


def status(*, config: Config, name: str | None = None) -> list[dict[str, Any]]:
    """Every chain, or one: what runs, gap and overlap so far, when the next job is expected."""
    home = config.state / "chains"
    if name is not None and not (home / name / "wish.json").exists():
        known = [path.parent.name for path in sorted(home.glob("*/wish.json"))]
        raise NotFound(f"there is no chain {name}{did_you_mean(name, known)}")
    folders = [home / name] if name else sorted(p.parent for p in home.glob("*/wish.json"))
    return [_report(folder, time.time_ns()) for folder in folders]


def cancel(*, config: Config, name: str, tell: Tell = lambda text: None) -> None:
    """End every job of the chain, whoever keeps it; returns when none is left."""
    [before] = status(config=config, name=name)
    if Phase(before["phase"]).over:
        raise UsageError(f"the chain {name} is over already: {before['phase']}")
    folder = config.state / "chains" / name
    (folder / "cancel").touch()
    until = time.monotonic() + CANCEL_PATIENCE_S
    while daemon.running(folder / "keeper.pid") is not None:
        if time.monotonic() > until:
            raise Unavailable(f"the keeper of {name} does not answer; its log is {folder}/log")
        time.sleep(POLL_S)
    if not kept_state(folder, name).phase.over:
        _kept(config, folder, tell)


def advance(*, config: Config, name: str) -> None:
    """Have the next job submitted now, whatever the policy thinks: its keeper does it."""
    [before] = status(config=config, name=name)
    if Phase(before["phase"]).over:
        raise UsageError(f"the chain {name} is over already: {before['phase']}")
    if before["keeper"] is None:
        raise Unavailable(f"nobody keeps the chain {name}; begin with `rn chain run --name {name}`")
    (config.state / "chains" / name / "next").touch()


def _report(folder: Path, now: int) -> dict[str, Any]:
    wish = kept_wish(folder)
    if wish is None:
        raise BadConfig(f"{folder}/wish.json cannot be read; end the chain's jobs with scancel")
    state = kept_state(folder, folder.name)
    tally = tally_of(state, wish.spec.handover, now)
    keeper = daemon.running(folder / "keeper.pid")
    live = [link for link in state.links if not link.state.over]
    current = next((link for link in reversed(live) if link.state is LinkState.RUNNING), None)
    waiting = next((link for link in live if link.state is LinkState.PENDING), None)
    outlook = state.outlook
    return {
        "name": folder.name,
        "phase": str(state.phase),
        "up": tally.up,
        "keeper": keeper.pid if keeper is not None else None,
        "policy": wish.policy,
        "gap_price": wish.gap_price,
        "handover": str(wish.spec.handover),
        "jobs": state.count,
        "current": None if current is None else current.id,
        "ends_in_s": _ahead(None if current is None else current.ends_at, now),
        "successor": None if waiting is None else waiting.id,
        "successor_waits": None if waiting is None else waiting.reason,
        "next_start": None
        if outlook is None
        else {
            "in_s": _ahead(outlook.at, now),
            "low_s": _ahead(outlook.low, now),
            "high_s": _ahead(outlook.high, now),
            "why": outlook.why,
        },
        "gap_s": round(tally.gap / SECOND, 1),
        "overlap_s": round(tally.overlap / SECOND, 1),
        "silent_s": None
        if state.silent_since is None
        else round((now - state.silent_since) / SECOND, 1),
        "words": state.words,
        "links": msgspec.to_builtins(state.links),
    }


def _ahead(at: int | None, now: int) -> float | None:
    return None if at is None else round(max(at - now, 0) / SECOND, 1)


def _detached(config: Config, folder: Path, tell: Tell) -> int:
    name = folder.name
    pid = daemon.spawn(
        rn("--state", str(config.state), "chain", "run", "--name", name),
        log=folder / "log",
        pid_file=folder / "keeper.pid",
        ready=lambda: True,
        patience_s=READY_S,
    )
    tell(f"the chain {name} is kept in the background (pid {pid}); see `rn chain status {name}`")
    return 0


def _slurm(config: Config) -> Slurm:
    """All chains of this state share one folder of answers, so that Slurm is asked once."""
    return Slurm(config.state / "chains" / ".slurm")
