"""A real Slurm for tests: slurmctld, slurmds and munged in a process namespace of their own.

All of it ends with the one process that we started. Commands are run from outside, by SLURM_CONF.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.live.ports import free_ports

CONF = """
ClusterName=campus
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={d}/munge/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={d}/state
SlurmdSpoolDir={d}/spool/%n
SlurmctldPidFile={d}/run/slurmctld.pid
SlurmdPidFile={d}/run/slurmd.%n.pid
SlurmctldLogFile={d}/log/slurmctld.log
SlurmdLogFile={d}/log/slurmd.%n.log
JobCompType=jobcomp/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmdParameters=config_overrides
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
ReturnToService=2
SlurmctldTimeout=300
SlurmdTimeout=300
KillWait=3
JobRequeue=1
PriorityType=priority/basic
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,bf_resolution=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
{nodes}
PartitionName=DEFAULT Nodes=ALL State=UP PriorityTier=1
PartitionName=normal Default=YES MaxTime=3-0 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=owner Default=NO MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF GraceTime=0
PartitionName=short Default=NO MaxTime=60 PriorityTier=1 PreemptMode=OFF GraceTime=0
"""
PATIENCE_S = 60.0


class RealSlurm:
    def __init__(self, folder: Path, *, nodes: int, gpus: int, grace_s: int) -> None:
        self.folder = folder
        self._nodes = nodes
        self._gpus = gpus
        self._grace_s = grace_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def conf(self) -> Path:
        return self.folder / "etc/slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def start(self) -> None:
        names = [f"n{k + 1}" for k in range(self._nodes)]
        for name in ("etc", "munge", "state", "run", "log", "dev", *(f"spool/{n}" for n in names)):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "munge").chmod(0o755)
        key = self.folder / "munge/key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        ports = free_ports(self._nodes + 1)
        gres = f" Gres=gpu:{self._gpus}" if self._gpus else ""
        lines = [
            f"NodeName={name} NodeAddr=127.0.0.1 NodeHostname=localhost Port={port} CPUs=8 "
            f"RealMemory=1000{gres} State=UNKNOWN"
            for name, port in zip(names, ports[1:], strict=True)
        ]
        self.conf.write_text(
            CONF.format(d=self.folder, port=ports[0], nodes="\n".join(lines), grace=self._grace_s)
        )
        for k in range(self._gpus):
            (self.folder / f"dev/gpu{k}").symlink_to("/dev/null")
        if self._gpus:
            last = self._gpus - 1
            devices = f"{self.folder}/dev/gpu[0-{last}]" if last else f"{self.folder}/dev/gpu0"
            (self.folder / "etc/gres.conf").write_text(
                f"AutoDetect=off\nNodeName=n[1-{self._nodes}] Name=gpu File={devices}\n"
            )
        d = self.folder
        munge = (
            f"munged -F --force --key-file {key} --socket {d}/munge/munge.socket "
            f"--pid-file {d}/munge/pid --log-file {d}/log/munged.log --seed-file {d}/munge/seed"
        )
        daemons = " ".join(f"slurmd -D -N {name} &" for name in names)
        script = (
            f"{munge} & while [ ! -S {d}/munge/munge.socket ]; do sleep 0.05; done; "
            f"{daemons} while :; do slurmctld -D; "
            f"while [ -e {d}/run/away ]; do sleep 0.1; done; done"
        )
        self._process = subprocess.Popen(
            ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc", "sh", "-c",
             script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self.env,
            start_new_session=True,
        )  # fmt: skip
        self.until(
            lambda: (
                self.ask("sinfo", "-h", "-N", "-p", "normal", "-o", "%t").split()
                == ["idle"] * self._nodes
            ),
            "the nodes did not become idle",
        )

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def ask(self, *words: str) -> str:
        done = subprocess.run(
            words, check=False, capture_output=True, text=True, env=self.env, timeout=PATIENCE_S
        )
        return done.stdout.strip()

    def states(self, *options: str) -> dict[str, str]:
        lines = self.ask("squeue", "-h", "-a", "-t", "all", "-o", "%i %T", *options).splitlines()
        return dict(line.split() for line in lines)

    def until(self, condition: Callable[[], Any], sentence: str) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            if time.monotonic() > deadline:
                log = self.folder / "log/slurmctld.log"
                tail = log.read_text()[-2000:] if log.exists() else ""
                raise AssertionError(f"{sentence}\n{tail}")
            time.sleep(0.1)
        return found


@contextlib.contextmanager
def real_slurm(*, nodes: int = 2, gpus: int = 0, grace_s: int = 0) -> Iterator[RealSlurm]:
    # Slurm's sockets need a short path.
    folder = Path("/tmp") / f"rn-slurm-{os.getpid()}-{time.monotonic_ns() % 10**6}"
    cluster = RealSlurm(folder, nodes=nodes, gpus=gpus, grace_s=grace_s)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
