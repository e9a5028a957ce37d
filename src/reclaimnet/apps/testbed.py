"""`rn testbed`: a campus of network namespaces from a file, and every trace of it removed."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Final

import reclaimnet
from reclaimnet.adapters.linux import bpfload, testbed
from reclaimnet.adapters.linux.testbed import Campus, Rack, Testbed
from reclaimnet.apps import up as service
from reclaimnet.apps.config import Config
from reclaimnet.apps.guard_client import GuardClient
from reclaimnet.apps.guard_processes import members, prepare_cgroups, remove_group, write_control
from reclaimnet.apps.own_command import rn
from reclaimnet.errors import BadConfig, NotFound, Unavailable
from reclaimnet.model.units import parse_rate

DEFAULT_MARK: Final = "campus"
RUN_DIR: Final = Path("/run/reclaimnet/testbed")
"""What guards of testbeds keep, by mark and host, so that `down` finds it after a crash."""
UNSHAPED: Final = 12_500_000_000
"""Bytes a second that a link without a shaper is said to carry: more than this machine can."""
_READY_SECONDS: Final = 20.0
_POLL_SECONDS: Final = 0.02
_END_SECONDS: Final = 5.0
_AT_ONCE: Final = 4
"""Hosts that are brought up at the same time."""

_FIRST_OWN: Final = 100
_OWN_NETWORKS: Final = 150
_TOP_KEYS: Final = frozenset({"mark", "network", "lanes", "lower_effort", "management", "rack"})
_RACK_KEYS: Final = frozenset({"name", "hosts", "uplink", "host_rate"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TestbedConfig:
    __test__ = False

    mark: str
    campus: Campus


def up(config: TestbedConfig) -> Testbed:
    """Build it; nothing is touched if it cannot be built here."""
    return testbed.up(config.campus, config.mark)


def populate(bed: Testbed, *, config: Config, gpus: int) -> None:
    """Start a campus at the testbed's edge, and a guard and an agent on every host, to stay until
    `down`. If anything fails, all of it goes again."""
    try:
        service.up(config=config, listen=str(bed.address), gateway_port=0, foreground=False)
        campus = json.loads((config.state / "campus.json").read_text())
        env = {**os.environ, "XDG_STATE_HOME": str(config.state.parent)}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            starting = [
                pool.submit(
                    run_agent,
                    bed,
                    host,
                    nats_url=campus["nats_url"],
                    nats_token=campus["nats_token"],
                    gpus=gpus,
                    env=env,
                )
                for host in bed.hosts
            ]
            for agent in starting:
                agent.result()
    except BaseException:
        down(bed.mark)
        service.end_all(config)
        raise


def down(mark: str | None = None) -> int:
    """Remove the testbed with this mark, or all of them; the number of namespaces removed."""
    kept = [path.name for path in RUN_DIR.glob("*")]
    removed = 0
    for one in [mark] if mark is not None else sorted({*testbed.marks(), *kept}):
        removed += testbed.down(one)
        _remove_guards(one)
    return removed


@contextlib.contextmanager
def running(config: TestbedConfig) -> Iterator[Testbed]:
    """A testbed for as long as a block runs, guards and all."""
    bed = up(config)
    try:
        yield bed
    finally:
        bed.down()
        _remove_guards(bed.mark)


def run_guard(
    bed: Testbed,
    host: str,
    *,
    agent_uid: int = 0,
    terms: Mapping[str, int] | None = None,
    lease: str = "1s",
) -> Path:
    """Start a guard on a host, with its lane; returns the socket it listens on."""
    path = prepare_guard(bed, host, agent_uid=agent_uid, terms=terms, lease=lease)
    start_guard(bed, host)
    return path


def prepare_guard(
    bed: Testbed, host: str, *, agent_uid: int, terms: Mapping[str, int] | None, lease: str
) -> Path:
    """Write the file of a host's guard; returns the socket that it will listen on."""
    folder = RUN_DIR / bed.mark / host
    folder.mkdir(parents=True)
    cgroups = prepare_cgroups(None)
    lane = bed.hosts[host].lane
    settings: dict[str, Any] = {
        "agent_uid": agent_uid,
        "socket": str(folder / "guard.sock"),
        "state": str(folder / "state"),
        "pins": str(folder / "pins"),
        "lease": lease,
    }
    if cgroups is not None:
        group = cgroups / _group_name(bed.mark, host)
        group.mkdir()
        settings["cgroup"] = str(group)
    if lane is not None:
        settings |= {"lane": testbed.LANE_INTERFACE, "lane_netns": str(lane), "uplinks": ["eth0"]}
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    lines += ["[terms]", *(f"{key} = {value}" for key, value in (terms or {}).items())]
    file = folder / "guard.toml"
    file.write_text("\n".join(lines) + "\n")
    file.chmod(0o600)
    return folder / "guard.sock"


def start_guard(bed: Testbed, host: str) -> "subprocess.Popen[Any]":
    """Start the guard of a host, for the first time or again; returns when it answers."""
    folder = RUN_DIR / bed.mark / host
    source = str(Path(reclaimnet.__file__).parents[1])
    with (folder / "guard.log").open("ab") as log:
        process = bed.run(
            host,
            [sys.executable, "-m", "reclaimnet.apps.guard", str(folder / "guard.toml")],
            env={**os.environ, "PYTHONPATH": source},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    _wait_for_guard(process, folder)
    return process


def run_agent(
    bed: Testbed, host: str, *, nats_url: str, nats_token: str, gpus: int, env: Mapping[str, str]
) -> "subprocess.Popen[Any]":
    """Start an agent on a host, under a guard of its own, that lends what it has and serves
    checkpoints from its lane. Its log is `agent.log` in the folder of its guard."""
    guard = run_guard(bed, host)
    source = str(Path(reclaimnet.__file__).parents[1])
    argv = rn("agent", "--name", host)
    argv += ["--join", nats_url, "--gpus", str(gpus), "--lend", "--notice", "20s"]
    argv += ["--guard", str(guard)]
    plan = topology(bed.campus)
    if plan:
        (guard.parent / "topology.toml").write_text(plan)
        argv += ["--topology", str(guard.parent / "topology.toml")]
    lane_address = bed.hosts[host].lane_address
    argv += ["--address", str(lane_address)] if lane_address is not None else []
    with (guard.parent / "agent.log").open("wb") as log:
        return bed.run(
            host,
            argv,
            env={**env, "PYTHONPATH": source, "RECLAIMNET_NATS__TOKEN": nats_token},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def topology(campus: Campus) -> str:
    """The plan of the campus as agents read it; empty if it says nothing of what links carry."""
    if not any(rack.uplink or rack.host_rate for rack in campus.racks):
        return ""
    lines = []
    for rack in campus.racks:
        lines += [f'[buildings."{rack.name}"]', f'uplink = "{8 * (rack.uplink or UNSHAPED)}"']
        for number in range(1, rack.hosts + 1):
            rate = rack.host_rate or rack.uplink or UNSHAPED
            lines += [f'[nodes."{rack.name}{number}"]', f'building = "{rack.name}"']
            lines += [f'uplink = "{8 * rate}"']
    return "\n".join(lines) + "\n"


def _wait_for_guard(process: "subprocess.Popen[Any]", folder: Path) -> None:
    end = time.monotonic() + _READY_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            GuardClient(folder / "guard.sock").close()
        except Unavailable:
            time.sleep(_POLL_SECONDS)
        else:
            return
    said = (folder / "guard.log").read_text().strip()
    raise Unavailable(f"The guard on {folder.name} did not start: {said or 'it said nothing'}")


def _remove_guards(mark: str) -> None:
    """The processes are gone with their namespaces; this is what they leave on the machine."""
    cgroups = prepare_cgroups(None)
    for folder in sorted((RUN_DIR / mark).glob("*")):
        if (folder / "pins").is_mount():
            bpfload.drop_bpffs(folder / "pins")
        shutil.rmtree(folder)
        group = None if cgroups is None else cgroups / _group_name(mark, folder.name)
        if group is not None and group.exists():
            _end_group(group)
    if (RUN_DIR / mark).exists():
        (RUN_DIR / mark).rmdir()
    if cgroups is not None and not any(path.is_dir() for path in cgroups.iterdir()):
        cgroups.rmdir()


def _end_group(group: Path) -> None:
    end = time.monotonic() + _END_SECONDS
    while members(group):
        write_control(group / "cgroup.kill", "1")
        if time.monotonic() > end:
            raise Unavailable(f"Processes in {group} do not end: look at them first.")
        time.sleep(_POLL_SECONDS)
    remove_group(group)


def _group_name(mark: str, host: str) -> str:
    return f"{testbed.PREFIX}-{mark}-{host}"


def read_config(path: Path, *, management: bool = False) -> TestbedConfig:
    """Read a campus file; BadConfig says in one sentence what is wrong with it. `management` gives
    it an interface to this machine, whether the file says so or not."""
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise NotFound(f"There is no testbed file {path}.") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadConfig(f"{path} cannot be read: {error}.") from error
    try:
        return parse_config(table | {"management": True} if management else table)
    except BadConfig as error:
        raise BadConfig(f"{path}: {error}") from error


def own_network() -> str:
    """A network for a testbed of this process, in which nobody here has an address: two with a
    management interface must not meet."""
    taken = testbed.local_addresses()
    for number in range(os.getpid(), os.getpid() + _OWN_NETWORKS):
        network = IPv4Network(f"10.{_FIRST_OWN + number % _OWN_NETWORKS}.0.0/16")
        if not any(address in network for address in taken):
            return str(network)
    raise Unavailable("All networks for testbeds are in use: rn testbed down removes old ones.")


def parse_config(table: Mapping[str, Any]) -> TestbedConfig:
    _refuse_unknown(table, _TOP_KEYS, "the file")
    racks = table.get("rack", [])
    if not isinstance(racks, list) or not all(isinstance(rack, dict) for rack in racks):
        raise BadConfig("Racks are written as [[rack]] tables.")
    try:
        network = IPv4Network(str(table.get("network", testbed.DEFAULT_NETWORK)))
    except ValueError as error:
        raise BadConfig(f"{table['network']!r} is not a network: {error}.") from error
    defaults = Campus(racks=())
    campus = Campus(
        racks=tuple(_rack(rack) for rack in racks),
        network=network,
        lanes=_flag(table, "lanes", default=defaults.lanes),
        lower_effort=_flag(table, "lower_effort", default=defaults.lower_effort),
        management=_flag(table, "management", default=defaults.management),
    )
    mark = str(table.get("mark", DEFAULT_MARK))
    testbed.check(campus, mark)
    return TestbedConfig(mark=mark, campus=campus)


def _rack(table: Mapping[str, Any]) -> Rack:
    _refuse_unknown(table, _RACK_KEYS, "a rack")
    name, hosts = table.get("name"), table.get("hosts")
    if not isinstance(name, str) or type(hosts) is not int:
        raise BadConfig("Each rack needs a name and a number of hosts.")
    return Rack(
        name=name,
        hosts=hosts,
        uplink=_rate(table, "uplink"),
        host_rate=_rate(table, "host_rate"),
    )


def _rate(table: Mapping[str, Any], key: str) -> int | None:
    try:
        return parse_rate(str(table[key])) if key in table else None
    except ValueError as error:
        raise BadConfig(f"{key}: {error}.") from error


def _flag(table: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = table.get(key, default)
    if not isinstance(value, bool):
        raise BadConfig(f"{key} is either true or false.")
    return value


def _refuse_unknown(table: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise BadConfig(f"{where} has no key {unknown[0]!r}; it has {', '.join(sorted(known))}.")
