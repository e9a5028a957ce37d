"""The simulated Slurm against a real slurmctld: the same jobs start in the same rank, wait as long.

The real one runs in private namespaces on sixteen virtual nodes, its clock sped up by libfaketime,
by first come, first served, and by age, size and fair share. The latter needs slurmdbd: without it
Slurm sets the weights of age and fair share to nothing, and says so only in its log.
This file is also the driver inside: `python test_slurm_fidelity.py FOLDER PRIORITY`.
"""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

NODES = 16
JOBS = 200
SPEED = 30
SPREAD_S = 650
"""Fake seconds over which the jobs arrive: more than sixteen nodes can do in that time."""
REAL_TIMEOUT_S = 300.0
LEAST_RANK = 0.92
MOST_OFF = 0.25
READY_TIMEOUT_S = 600
"""Fake seconds."""
RELEASE_LAGS_S = range(11)
BACKFILL_INTERVALS_S = (5, 8)
"""A node is free again a little after its job's recorded end (an epilog and a message), and the
backfill scheduler looks again a little later than it was told: both take their time on a busy
machine, and that time is sped up too. These two are fitted on the first half of the jobs."""

CONF = """
ClusterName=fidelity
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=26817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={d}/munge/munge.socket
CredType=cred/munge
StateSaveLocation={d}/state
SlurmdSpoolDir={d}/spool/%n
SlurmctldPidFile={d}/run/slurmctld.pid
SlurmdPidFile={d}/run/slurmd.%n.pid
SlurmctldLogFile={d}/log/slurmctld.log
SlurmdLogFile={d}/log/slurmd.%n.log
JobCompType=jobcomp/filetxt
JobCompLoc={d}/log/jobcomp.txt
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
ReturnToService=2
MessageTimeout=100
SlurmctldTimeout=3000
SlurmdTimeout=3000
KillWait=5
{priority}
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=5,bf_resolution=60,bf_window=2880,bf_max_job_test=500,sched_interval=5
NodeName=DEFAULT CPUs=1 RealMemory=1000 State=UNKNOWN
NodeName=n[1-{n}] NodeAddr=127.0.0.1 NodeHostname=localhost Port=[27001-{last}]
PartitionName=normal Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

ACCOUNTS = ("a1", "a2", "a3", "a4")
ASSOCIATIONS = len(ACCOUNTS) + 1
"""Slurm gives root a share of its own, which nobody uses."""
WEIGHTS = {"age": 10_000, "size": 1_000, "fair": 2_000}
PRIORITY = {
    "basic": """
PriorityType=priority/basic
AccountingStorageType=accounting_storage/none
""",
    "multifactor": """
PriorityType=priority/multifactor
PriorityWeightAge=10000
PriorityMaxAge=0-1
PriorityWeightJobSize=1000
PriorityWeightFairshare=2000
PriorityDecayHalfLife=0-1
PriorityCalcPeriod=1
DebugFlags=Priority
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort=26819
AccountingStoragePass={d}/munge/munge.socket
""",
}
DBD = """
AuthType=auth/munge
AuthInfo=socket={d}/munge/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=26819
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=26820
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
LogFile={d}/log/slurmdbd.log
PidFile={d}/run/slurmdbd.pid
MessageTimeout=100
"""


def planned_jobs() -> list[dict[str, int]]:
    """When, how wide, how long, with which limit: small ones and wide ones, most end early."""
    rng = random.Random(7)
    jobs = []
    for at in sorted(rng.uniform(0, SPREAD_S) for _ in range(JOBS)):
        limit = rng.choice((1, 1, 1, 2))
        jobs.append(
            {
                "at": int(at),
                "nodes": rng.choice((1, 1, 1, 1, 2, 2, 3, 6)),
                "limit": limit,
                "run": max(5, int(limit * 60 * rng.choice((0.2, 0.4, 0.6, 0.9)))),
                "account": rng.choices(range(len(ACCOUNTS)), (8, 4, 2, 1))[0],
            }
        )
    return jobs


@pytest.mark.needs("slurm", "root")
def test_first_come_first_served_real_and_simulated_slurm_start_jobs_alike() -> None:
    _alike("basic")


@pytest.mark.needs("slurm", "slurmdbd", "root")
def test_by_age_size_and_fair_share_they_start_jobs_alike() -> None:
    _alike("multifactor")


def _alike(priority: str) -> None:
    """Twice, if need be: on a busy machine sped-up time is not what Slurm thinks it is."""
    rank, off = _compare(priority)
    if rank <= LEAST_RANK or off >= MOST_OFF:
        rank, off = _compare(priority)
    assert rank > LEAST_RANK
    assert off < MOST_OFF, "simulated jobs wait for another time than real ones"


def _compare(priority: str) -> tuple[float, float]:
    """The rank correlation of starts, and by which share the mean waits differ."""
    for program in ("faketime", "munged", "unshare"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    # Imported here: inside the namespaces this file runs as a script without the package.
    from scipy.stats import spearmanr

    # Slurm's sockets need a short path.
    folder = Path(tempfile.mkdtemp(prefix="rn-fidelity-", dir="/tmp"))
    folder.chmod(0o755)
    namespaces = ["unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
    # A shared-memory folder of its own: faketime names what it keeps there by process id, which
    # starts anew in every namespace, and a killed one leaves it behind.
    inside = f'mount -t tmpfs none /dev/shm && exec faketime -f "+0 x{SPEED}" "$@"'
    process = subprocess.Popen(
        [*namespaces, "sh", "-c", inside, "sh", sys.executable, __file__, str(folder), priority],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, errors = process.communicate(timeout=REAL_TIMEOUT_S)
        records = (
            json.loads((folder / "records.json").read_text()) if not process.returncode else []
        )
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)
    assert records, errors
    assert len(records) == JOBS

    real = [record["start"] for record in records]
    early = records[: JOBS // 2]

    def missed(fit: tuple[int, int]) -> int:
        starts = simulated_starts(records, fit, priority)
        return sum(
            abs(start - record["start"]) for start, record in zip(starts, early, strict=False)
        )

    fit = min(itertools.product(RELEASE_LAGS_S, BACKFILL_INTERVALS_S), key=missed)
    ours = simulated_starts(records, fit, priority)
    waits = [record["start"] - record["submit"] for record in records]
    our_waits = [start - record["submit"] for start, record in zip(ours, records, strict=True)]
    rank = float(spearmanr(real, ours).statistic)
    mean, our_mean = sum(waits) / JOBS, sum(our_waits) / JOBS
    off = sorted(abs(a - b) for a, b in zip(real, ours, strict=True))
    print(
        f"{priority}: start rank correlation {rank:.4f}; wait correlation "
        f"{float(spearmanr(waits, our_waits).statistic):.4f}; mean wait {mean:.1f} s real, "
        f"{our_mean:.1f} s simulated; starts differ by {off[JOBS // 2]} s (median), "
        f"{off[JOBS * 9 // 10]} s (9 of 10); fitted: release lag {fit[0]} s, "
        f"backfill every {fit[1]} s"
    )
    assert mean > 30, "the load never queued, so nothing was compared"
    return rank, abs(our_mean - mean) / mean


def simulated_starts(
    records: list[dict[str, int]], fit: tuple[int, int], priority: str
) -> list[int]:
    """The same jobs, submitted when they were and running as long as they did, in simulation."""
    from reclaimnet.sim.slurm.cluster import BatchJob, Cluster, Settings

    lag, interval = fit
    multifactor = priority == "multifactor"
    rules = Settings(
        age_weight=WEIGHTS["age"],
        max_age_s=3_600 if multifactor else 7 * 86_400,
        size_weight=WEIGHTS["size"] if multifactor else 0.0,
        fair_share_weight=WEIGHTS["fair"] if multifactor else 0.0,
        half_life_s=3_600,
        associations=ASSOCIATIONS,
        calc_period_s=records[0]["reckoned_every"] if multifactor else 0,
        calc_begin_s=records[0]["reckoned_first"],
        backfill_interval_s=interval,
        resolution_s=60,
    )
    cluster = Cluster(pools={"nodes": NODES}, settings=rules)
    for record in records:
        cluster.submit(
            BatchJob(
                id=f"{record['id']:06d}",
                user=ACCOUNTS[record["account"]],
                submit_s=record["submit"],
                run_s=record["end"] - record["start"] + lag,
                limit_s=record["limit"] * 60 + 60,
                nodes=record["nodes"],
            )
        )
    cluster.run()
    return [cluster.records[f"{record['id']:06d}"].start_s or 0 for record in records]


# --- inside the namespaces ------------------------------------------------------------------


def drive(folder: Path, priority: str) -> None:
    """Start a whole cluster, submit the jobs at their times, write down what became of them."""
    _command("ip", "link", "set", "lo", "up")
    # With only a loopback, name look-ups of every Slurm command would hang.
    _command("ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1")
    _command("ip", "addr", "add", "10.77.0.1/24", "dev", "v0")
    _command("ip", "link", "set", "v0", "up")
    _command("ip", "link", "set", "v1", "up")
    for name in ("etc", "munge", "state", "run", "log", *(f"spool/n{k + 1}" for k in range(NODES))):
        (folder / name).mkdir(parents=True)
    (folder / "munge").chmod(0o755)
    key = folder / "munge/key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    conf = folder / "etc/slurm.conf"
    chosen = PRIORITY[priority].format(d=folder).strip()
    conf.write_text(CONF.format(d=folder, n=NODES, last=27_000 + NODES, priority=chosen))
    os.environ["SLURM_CONF"] = str(conf)
    socket = folder / "munge/munge.socket"
    _start(
        "munged", "-F", "--force", "--key-file", str(key), "--socket", str(socket),
        "--pid-file", str(folder / "munge/pid"), "--log-file", str(folder / "log/munged.log"),
        "--seed-file", str(folder / "munge/seed"), "--num-threads", "10",
    )  # fmt: skip
    _wait(socket.exists, "munged made no socket")
    if priority == "multifactor":
        _start_database(folder)
    _start("slurmctld", "-D")
    for k in range(NODES):
        _start("slurmd", "-D", "-N", f"n{k + 1}")
    _wait(
        lambda: _output("sinfo", "-h", "-N", "-o", "%t").split() == ["idle"] * NODES,
        "the nodes did not become idle",
    )
    begin = time.time()
    submitted: dict[int, dict[str, int]] = {}
    for job in planned_jobs():
        time.sleep(max(0.0, begin + job["at"] - time.time()))
        told = _output(
            "sbatch", "--parsable", f"-N{job['nodes']}", "--ntasks-per-node=1",
            f"-t{job['limit'] + 1}", "-o/dev/null", f"--wrap=exec sleep {job['run']}",
            *([f"-A{ACCOUNTS[job['account']]}"] if priority == "multifactor" else []),
        )  # fmt: skip
        submitted[int(told)] = job
    done = folder / "log/jobcomp.txt"
    _wait(
        lambda: done.exists() and len(done.read_text().splitlines()) == JOBS,
        "not all jobs ended",
    )
    first, every = _reckonings(folder / "log/slurmctld.log")
    records = []
    for line in done.read_text().splitlines():
        cells = dict(cell.partition("=")[::2] for cell in line.split())
        id = int(cells["JobId"])
        records.append(
            {
                "id": id,
                "submit": _seconds(cells["SubmitTime"]),
                "start": _seconds(cells["StartTime"]),
                "end": _seconds(cells["EndTime"]),
                "nodes": submitted[id]["nodes"],
                "limit": submitted[id]["limit"],
                "account": submitted[id]["account"],
                "reckoned_first": first,
                "reckoned_every": every,
            }
        )
    (folder / "records.json").write_text(json.dumps(sorted(records, key=lambda r: r["id"])))


def _reckonings(log: Path) -> tuple[int, int]:
    """When priorities were first reckoned anew, and how often: late by what a pass takes."""
    at = [
        _seconds(line[1:20]) for line in log.read_text().splitlines() if "Decay factor over" in line
    ]
    return (at[0], round((at[-1] - at[0]) / (len(at) - 1))) if len(at) > 1 else (0, 0)


def _start_database(folder: Path) -> None:
    """MariaDB and slurmdbd, with an account for each of those who share."""
    data = folder / "db"
    _command(
        "mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=root",
        "--auth-root-authentication-method=normal", "--skip-test-db",
    )  # fmt: skip
    socket = folder / "run/db.sock"
    _start(
        "mariadbd", "--no-defaults", f"--datadir={data}", f"--socket={socket}", "--user=root",
        "--port=26820", "--bind-address=127.0.0.1", f"--pid-file={folder}/run/db.pid",
        "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M",
        "--innodb-flush-log-at-trx-commit=0",
    )  # fmt: skip
    ask = ("mariadb", "--no-defaults", f"--socket={socket}", "-uroot", "-e")
    _wait(lambda: subprocess.run([*ask, "select 1"], check=False, capture_output=True)
          .returncode == 0, "MariaDB does not answer")  # fmt: skip
    grants = "create database slurm_acct_db;" + "".join(
        f"create user slurm@'{host}' identified by 'slurm'; "
        f"grant all on slurm_acct_db.* to slurm@'{host}';"
        for host in ("localhost", "127.0.0.1")
    )
    _command(*ask, grants)
    conf = folder / "etc/slurmdbd.conf"
    conf.write_text(DBD.format(d=folder))
    conf.chmod(0o600)
    _start("slurmdbd", "-D")
    _wait(lambda: "Cluster" in _output("sacctmgr", "-P", "list", "cluster"), "no slurmdbd")
    _command("sacctmgr", "-i", "add", "cluster", "fidelity")
    for account in ACCOUNTS:
        _command("sacctmgr", "-i", "add", "account", account, "cluster=fidelity")
        _command("sacctmgr", "-i", "add", "user", "root", f"account={account}")


def _command(*args: str) -> None:
    subprocess.run(args, check=True, stdout=subprocess.DEVNULL)


def _output(*args: str) -> str:
    done = subprocess.run(args, check=False, capture_output=True, text=True)
    return done.stdout.strip()


def _start(*args: str) -> None:
    subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _wait(condition, sentence: str) -> None:
    deadline = time.time() + READY_TIMEOUT_S * 3
    while not condition():
        if time.time() > deadline:
            sys.exit(sentence)
        time.sleep(2.0)


def _seconds(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


if __name__ == "__main__":
    drive(Path(sys.argv[1]), sys.argv[2])
