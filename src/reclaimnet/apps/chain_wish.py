"""What a person wishes of a chain: worked out of what they said, and checked by the cluster."""

import getpass
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from reclaimnet.adapters.slurm.client import Slurm
from reclaimnet.adapters.slurm.words import PartitionRow
from reclaimnet.apps import chain_job, chain_policies
from reclaimnet.apps.config import did_you_mean
from reclaimnet.errors import UsageError
from reclaimnet.model.chain import (
    ChainSpec,
    Handover,
    Tempo,
)
from reclaimnet.model.supply import Promise
from reclaimnet.model.units import MINUTE, show_duration
from reclaimnet.policy.provision import FAIR_PRICE

BUSY: Final = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING")
"""States in which a job has nodes, or is about to give them back."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the person asked for: kept on disk, so that any later keeper does the same."""

    id: str
    """Tells this life of the chain from an earlier one of the same name."""
    spec: ChainSpec
    order: chain_job.Order
    partition: str | None = None
    options: tuple[str, ...] = ()
    """For sbatch, as the person gave them."""
    policy: str = "plan"
    gap_price: float = FAIR_PRICE
    lead_h: float = 6.0
    weights: str | None = None
    promise: Promise | None = None
    begun: int = field(default_factory=time.time_ns)

    @property
    def comment(self) -> str:
        return f"rn-chain {self.spec.name}/{self.id}"


def name_of(command: Sequence[str]) -> str:
    if not command:
        raise UsageError("what is to be run? Write it after --, as in `rn chain run -- ./serve.sh`")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(command[0]).stem).strip("-.") or "chain"


def made_wish(
    folder: Path,
    command: Sequence[str],
    *,
    name: str,
    limit: int | None,
    nodes: int | None,
    partition: str | None,
    options: Sequence[str],
    handover: Handover,
    ready_port: int | None,
    ready_command: str | None,
    ready_file: bool,
    save_signal: str,
    policy: str,
    gap_price: float,
    lead_h: float,
    weights: Path | None,
    promise: Promise | None,
    tempo: Tempo,
) -> Wish:
    asked = chain_job.Asked()
    words = list(command)
    if len(words) == 1 and Path(words[0]).is_file():
        asked = chain_job.read_script(Path(words[0]))
    if Path(words[0]).is_file():
        path = Path(words[0]).absolute()
        # As sbatch would: a script need not be executable.
        words[0:1] = [str(path)] if os.access(path, os.X_OK) else ["bash", str(path)]
    elif shutil.which(words[0]) is None:
        raise UsageError(f"there is no {words[0]} here or on PATH; name a script or a program")
    length = limit if limit is not None else asked.limit
    if length is None:
        raise UsageError("how long may one job run? Say so with --limit, for example --limit 48h")
    if length < MINUTE:
        raise UsageError("a limit is at least a minute: Slurm counts in minutes")
    if sum((ready_port is not None, ready_command is not None, ready_file)) > 1:
        raise UsageError("--ready-port, --ready-cmd and --ready-file exclude each other")
    return Wish(
        id=secrets.token_hex(3),
        spec=ChainSpec(
            name=name,
            nodes=nodes or asked.nodes or 1,
            limit=length,
            handover=handover,
            tempo=tempo,
        ),
        order=chain_job.Order(
            name=name,
            folder=str(folder),
            workdir=str(Path.cwd()),
            command=tuple(words),
            directives=asked.directives,
            handover=handover,
            ready_port=ready_port,
            ready_command=ready_command,
            ready_file=ready_file,
            save_signal=save_signal,
        ),
        partition=partition or asked.partition,
        options=tuple(options),
        policy=policy,
        gap_price=gap_price,
        lead_h=lead_h,
        weights=None if weights is None else str(weights.absolute()),
        promise=promise,
    )


def checked(wish: Wish, slurm: Slurm) -> Wish:
    """What Slurm would let wait for ever is refused before it is asked."""
    found = slurm.partitions()
    default = next((name for name, partition in found.items() if partition.default), None)
    asked = wish.partition or default
    if asked is None:
        raise UsageError(
            f"this cluster has no default partition; name one with --partition"
            f"{did_you_mean('', sorted(found))}"
        )
    for name in asked.split(","):
        partition = found.get(name)
        if partition is None:
            raise UsageError(f"there is no partition {name}{did_you_mean(name, sorted(found))}")
        _fits(wish, partition)
    return replace(wish, partition=asked)


def _fits(wish: Wish, partition: PartitionRow) -> None:
    if wish.spec.limit > partition.max_limit:
        raise UsageError(
            f"a limit of {show_duration(wish.spec.limit)} is too long for {partition.name}, which "
            f"allows {show_duration(partition.max_limit)}; ask for less with --limit"
        )
    if wish.spec.nodes > partition.nodes:
        raise UsageError(
            f"{partition.name} has {partition.nodes} nodes, not {wish.spec.nodes}; "
            "ask for fewer with --nodes"
        )


def adopted(wish: Wish, slurm: Slurm, tell: Tell) -> Wish:
    """Jobs of a chain of this name whose keeper and folder are gone are taken up."""
    pattern = re.compile(rf"rn-chain {re.escape(wish.spec.name)}/([0-9a-f]+) \d+")
    for row in slurm.jobs_of(getpass.getuser()):
        found = pattern.fullmatch(row.comment)
        if found is not None and row.state in ("PENDING", *BUSY):
            tell(f"job {row.id} of an earlier {wish.spec.name} is in the queue; it is taken up")
            return replace(wish, id=found[1])
    return wish


def policy_of(wish: Wish) -> Any:
    return chain_policies.build(
        wish.policy,
        lead_h=wish.lead_h,
        gap_price=wish.gap_price,
        promise=wish.promise,
        weights=None if wish.weights is None else Path(wish.weights),
    )
