"""Behind `rn borrow slurm` and `rn lend --slurm-node`: capacity of a batch system in the pool.

Borrowed: an agent inside a batch job lends its GPUs to the campus, until the batch system's own
clock or a preemption ends the loan. Lent: an owner takes a node out of the batch system, and gives
it back when it is reclaimed.
"""

import asyncio
import logging
import os
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from reclaimnet.adapters.gpu import find
from reclaimnet.adapters.slurm.client import Slurm, SubmitFailed
from reclaimnet.apps import agent, chain_live
from reclaimnet.apps.agent import Allocation
from reclaimnet.apps.agent_start import campus_of, own_address
from reclaimnet.apps.chain_job import EXIT_GO_ON
from reclaimnet.apps.config import Config, did_you_mean
from reclaimnet.apps.own_command import rn
from reclaimnet.errors import Unavailable, UsageError
from reclaimnet.model.asking import LendRequest
from reclaimnet.model.market import NodeId
from reclaimnet.model.units import HOUR, MINUTE, SECOND, show_count, show_duration
from reclaimnet.policy.provision import FAIR_PRICE

SIGNAL_SLACK: Final = MINUTE
"""Slurm sends the signal before a limit up to a minute early or late."""
DRAIN_PATIENCE_S: Final = 24 * 3_600.0
DRAIN_POLL_S: Final = 2.0

Tell = Callable[[str], None]


def borrow(
    *,
    config: Config,
    gpus: int,
    limit: int,
    partition: str | None = None,
    options: Sequence[str] = (),
    keep: bool = False,
    gap_price: float = FAIR_PRICE,
    join: str | None = None,
    token: str | None = None,
    tell: Tell = lambda text: None,
) -> dict[str, Any]:
    """Submit a batch job that lends its GPUs to the campus; what was promised to borrowers.

    With `keep` it is the first of a chain: the next allocation is asked for in good time, and when
    its agent lends, the one before it gives its guests notice, who move over.
    """
    slurm = Slurm(config.state / "chains" / ".slurm")
    url, secret = campus_of(config, join, token)
    chosen = _partition(slurm, partition, limit)
    grace, kill_wait = slurm.warning_of(chosen)
    notice = grace or kill_wait
    folder = config.state / "borrowed"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    token_file = folder / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(secret)
    script = folder / "agent.sh"
    script.write_text(
        _script(url, token_file, gpus=gpus, limit=limit, notice=notice, kill_wait=kill_wait)
    )
    warned = "" if grace else "; it preempts without a word before SIGTERM"
    promised = (
        f"{show_count(gpus, 'GPU')} of {chosen} for {show_duration(limit)}, "
        f"with {show_duration(notice)} notice{warned}"
    )
    asked = [f"--gres=gpu:{gpus}", f"--signal=B:USR1@{(notice + SIGNAL_SLACK) // SECOND}", *options]
    report: dict[str, Any] = {"partition": chosen, "notice_s": notice / SECOND}
    if keep:
        name = f"borrow-{chosen}-{gpus}"
        chain_live.run(
            config=config,
            command=["bash", str(script)],
            name=name,
            limit=limit,
            nodes=1,
            partition=chosen,
            options=asked,
            handover="drain",
            ready_file=True,
            gap_price=gap_price,
            detach=True,
            tell=tell,
        )
        tell(f"{name} lends {promised}, again and again; `rn chain cancel {name}` ends it")
        return {"chain": name, **report}
    job = _submitted(slurm, script, chosen, limit, asked)
    tell(f"job {job} will lend {promised}; `scancel {job}` ends it")
    return {"job": job, "node": f"slurm-{job}", **report}


def _partition(slurm: Slurm, asked: str | None, limit: int) -> str:
    """The one that was asked for, or else the cluster's own; refused if it cannot be."""
    if limit < 5 * MINUTE:
        raise UsageError("less than five minutes is not worth a loan; ask for more with --time")
    found = slurm.partitions()
    chosen = asked or next((name for name, row in found.items() if row.default), None)
    if chosen is None or chosen not in found:
        raise UsageError(f"there is no partition {chosen}{did_you_mean(chosen or '', list(found))}")
    if limit > found[chosen].max_limit:
        allowed = show_duration(found[chosen].max_limit)
        raise UsageError(f"{chosen} allows {allowed} at most; ask for less with --time")
    return chosen


def _submitted(
    slurm: Slurm, script: Path, partition: str, limit: int, options: Sequence[str]
) -> str:
    try:
        return slurm.submit(
            script,
            "--job-name=rn-borrow",
            f"--time={-(-limit // MINUTE)}",
            "--nodes=1",
            f"--partition={partition}",
            "--no-requeue",
            f"--output={script.parent}/%j.log",
            *options,
        )
    except SubmitFailed as error:
        raise UsageError(f"Slurm refuses: {error}") from error


def _script(
    url: str, token_file: Path, *, gpus: int, limit: int, notice: int, kill_wait: int
) -> str:
    """Plain bash: what Slurm tells the script, the script tells the agent."""
    words = rn(
        "borrow", "inside", "--join", url, "--token-file", str(token_file), "--gpus", str(gpus),
        "--notice", f"{notice // SECOND}s", "--kill-wait", f"{kill_wait // SECOND}s",
    )  # fmt: skip
    return "\n".join(
        [
            "#!/bin/bash",
            'home=$(mktemp -d "${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/rn-borrow-XXXXXX") || exit 73',
            f"ends=${{SLURM_JOB_END_TIME:-$(( $(date +%s) + {limit // SECOND} ))}}",
            f'{shlex.join(words)} --folder "$home" --ends "$ends" &',
            "child=$!",
            "trap 'kill -USR1 \"$child\"' USR1",
            "trap 'kill -TERM \"$child\"' TERM",
            # In a chain, whoever is to hand over to us waits for this sign.
            'until [ -z "$RN_READY_FILE" ] || [ -S "$home/control.sock" ] || '
            '! kill -0 "$child" 2>/dev/null; do sleep 0.5; done',
            '[ -S "$home/control.sock" ] && [ -n "$RN_READY_FILE" ] && touch "$RN_READY_FILE"',
            'while kill -0 "$child" 2>/dev/null; do wait "$child"; done',
            'wait "$child"; code=$?',
            'rm -rf "$home"',
            # The loan is over, but in a chain the next one follows.
            f'[ -n "$RN_CHAIN" ] && [ "$code" = 0 ] && exit {EXIT_GO_ON}',
            'exit "$code"',
        ]
    ) + "\n"  # fmt: skip


def inside(
    *,
    folder: Path,
    join: str,
    token_file: Path,
    gpus: int,
    notice: int,
    kill_wait: int,
    ends_s: int,
) -> int:
    """The agent within the allocation."""
    node = NodeId(f"slurm-{os.environ.get('SLURM_JOB_ID', os.getpid())}")
    ends = ends_s * SECOND
    settings = agent.Settings(
        node=node,
        folder=folder,
        url=join,
        token=token_file.read_text().strip(),
        gpus=find.allocated(node, gpus, os.environ.get("CUDA_VISIBLE_DEVICES", "")),
        host=own_address(join),
        lend=LendRequest(notice=notice, ends=ends),
        allocation=Allocation(ends=ends, grace=notice, kill_wait=kill_wait),
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    return asyncio.run(agent.run(settings))


# --- the other way round --------------------------------------------------------------------


def take_out(node: str, *, config: Config, tell: Tell) -> None:
    """Drain a Slurm node and wait until its last batch job has ended: from then on it can be lent.

    What runs there is not disturbed.
    """
    slurm = Slurm(config.state / "chains" / ".slurm")
    slurm.drain(node, "lent_with_rn")
    said = False
    until = time.monotonic() + DRAIN_PATIENCE_S
    while not _empty(slurm.node(node)):
        if not said:
            tell(f"{node} takes no more batch jobs; waiting for those that run to end")
            said = True
        if time.monotonic() > until:
            raise Unavailable(f"{node} still runs batch jobs after {show_duration(24 * HOUR)}")
        time.sleep(DRAIN_POLL_S)
    tell(f"{node} is out of Slurm's hands")


def put_back(node: str, *, config: Config, tell: Tell) -> None:
    """Slurm has its node again."""
    slurm = Slurm(config.state / "chains" / ".slurm")
    if "DRAIN" not in slurm.node(node).get("State", ""):
        tell(f"{node} is Slurm's already")
        return
    slurm.resume(node)
    tell(f"{node} takes batch jobs again")


def _empty(shown: dict[str, str]) -> bool:
    state = shown.get("State", "")
    return "DRAIN" in state and not any(word in state for word in ("ALLOC", "MIXED", "COMPLETING"))
