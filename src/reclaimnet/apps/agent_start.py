"""Behind `rn agent`: what its options mean for this machine, and the start, here or detached."""

import asyncio
import getpass
import json
import logging
import os
import socket
import sys
from ipaddress import ip_network
from pathlib import Path
from typing import Final

from reclaimnet.adapters.gpu import find
from reclaimnet.adapters.linux import sandbox
from reclaimnet.adapters.linux.sandbox import Sandbox
from reclaimnet.apps import agent, daemon
from reclaimnet.apps.agent_options import NO_SANDBOX, Options, keep_start
from reclaimnet.apps.cli_base import waiting
from reclaimnet.apps.client import ask_local
from reclaimnet.apps.config import Config, did_you_mean
from reclaimnet.apps.names import NAME, cannot_be
from reclaimnet.apps.own_command import rn
from reclaimnet.apps.owners_word import FILE, is_taken_back
from reclaimnet.apps.register import read_invitation
from reclaimnet.engine.body import WHOLE
from reclaimnet.errors import BadConfig, ReclaimNetError, Unavailable, UsageError
from reclaimnet.model.asking import LendRequest, StatusRequest
from reclaimnet.model.market import NodeId
from reclaimnet.model.units import parse_rate
from reclaimnet.policy.suite import SUITES
from reclaimnet.policy.topology import Topology, parse_topology

READY_S: Final = 30.0


def main(options: Options, *, config: Config, detach: bool) -> int:
    suite = options.suite
    if suite not in SUITES:
        raise UsageError(f"there is no suite {suite}{did_you_mean(suite, list(SUITES))}")
    node = _node_of(options.name)
    box = _sandbox(options, hidden=config.state)
    plan = _plan_in(options.topology) if options.topology is not None else None
    uplink_bps = _uplink(node, options.uplink, plan)
    url, secret = campus_of(config, options.join, options.token)
    if box is None and options.token is not None:
        sys.stderr.write(
            f"Guests will see what {getpass.getuser()} sees on this machine; --sandbox open shows "
            "them nothing but their own files and GPUs.\n"
        )
    folder = config.agents / node
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    running = daemon.running(folder / "agent.pid")
    if running is not None:
        raise UsageError(
            f"an agent for {node} runs here already (pid {running.pid}); "
            "give this one another --name"
        )
    if options.lend and is_taken_back(folder / FILE):
        sys.stderr.write(
            f"{node} stays its owner's, who has taken it back: --lend is for the first start. "
            f"`rn lend --node {node}` lends it again.\n"
        )
    if detach:
        return _detached(options, config, node, folder, url=url, token=secret)
    gpus = options.gpus
    found = find.declared(node, gpus) if gpus is not None else find.found()
    if not found:
        raise UsageError(
            "no GPU was found here; declare some to try things out, for example: rn agent --gpus 2"
        )
    settings = agent.Settings(
        node=node,
        folder=folder,
        url=url,
        token=secret,
        gpus=found,
        host=options.address or own_address(url),
        lend=LendRequest(notice=options.notice) if options.lend else None,
        vault_quota=options.vault_quota,
        suite=suite,
        guard=options.guard,
        uplink_bps=uplink_bps,
        grace=options.grace,
        zone=_zone_of(node, options.zone, plan),
        topology=plan,
        sandbox=box,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # It warns of every TLS connection that ends.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    keep_start(folder, node, options)
    return asyncio.run(agent.run(settings))


def _node_of(name: str | None) -> NodeId:
    node = NodeId(socket.gethostname().partition(".")[0] if name is None else name)
    if not NAME.fullmatch(node):
        raise UsageError(f"{cannot_be(node, 'a node')}: give one with --name, as lab-pc-7")
    return node


def _sandbox(options: Options, *, hidden: Path) -> Sandbox | None:
    """Refused if it cannot be had: no guest ever runs with less than was asked for."""
    if options.guests == NO_SANDBOX:
        if options.shares:
            raise UsageError("--share is for guests in a sandbox; add --sandbox none, for example")
        return None
    try:
        campus = [ip_network(text) for text in options.campus_nets]
    except ValueError as error:
        raise UsageError(f"--campus-net: {error}; give one like 10.0.0.0/8") from error
    network = sandbox.Network(options.guests)
    obstacle = sandbox.obstacle(network)
    if obstacle is not None:
        raise Unavailable(
            f"guests cannot have a sandbox here: {obstacle}; mend it, or choose --sandbox off"
        )
    return Sandbox(
        network=network,
        campus=tuple(campus) or sandbox.PRIVATE,
        shares=tuple(share.resolve() for share in options.shares),
        hidden=(hidden,),
        disk_bytes=options.guest_disk,
    )


def _plan_in(file: Path) -> Topology:
    try:
        text = file.read_text()
    except OSError as error:
        raise BadConfig(f"{file} cannot be read: {error.strerror}") from error
    return parse_topology(text, file=str(file))


def _uplink(node: NodeId, uplink: str | None, plan: Topology | None) -> int | None:
    """Bytes a second, as far as anybody has said."""
    if uplink is None:
        spot = plan.nodes.get(node) if plan is not None else None
        return spot.uplink_bps if spot is not None else None
    try:
        rate = parse_rate(uplink)
    except ValueError as error:
        raise UsageError(f"--uplink: {error}") from error
    if rate <= 0:
        raise UsageError("--uplink: an uplink carries more than nothing; for example 1G or 100M")
    return rate


def _zone_of(node: NodeId, name: str | None, plan: Topology | None) -> str:
    zone = name if name is not None else plan.zone(node) if plan is not None else WHOLE
    if not NAME.fullmatch(zone):
        raise UsageError(cannot_be(zone, "a zone"))
    return zone


def campus_of(config: Config, join: str | None, token: str | None) -> tuple[str, str]:
    """Where NATS is: as given, or as `rn up` left it on this machine."""
    if token is not None:
        return join or read_invitation(token).url, token
    if join is not None:
        raise UsageError("give the campus's invitation with --token-file FILE")
    try:
        left = json.loads((config.state / "campus.json").read_text())
        return str(left["nats_url"]), str(left["nats_token"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unavailable(
            "no campus runs on this machine; start one with `rn up`, or join one with "
            "--token-file FILE"
        ) from error


def own_address(url: str) -> str:
    """The address of ours from which the campus's server is reached."""
    host, _, port = url.rpartition("//")[2].rpartition(":")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect((host.strip("[]"), int(port)))
        except (OSError, ValueError) as error:
            raise Unavailable(f"{url} cannot be reached: {error}") from error
        return str(s.getsockname()[0])


def _detached(
    options: Options, config: Config, node: NodeId, folder: Path, *, url: str, token: str
) -> int:
    argv = rn("--state", str(config.state), "agent")
    argv += ["--join", url, "--name", node, *options.argv()]
    env = {**os.environ, "RECLAIMNET_NATS__TOKEN": token}
    with waiting("the agent joins the campus"):
        pid = daemon.spawn(
            argv,
            log=folder / "agent.log",
            pid_file=folder / "agent.pid",
            ready=lambda: _answers(config, node),
            patience_s=READY_S,
            env=env,
        )
    # The agent has no file with its invitation, and we know of one.
    keep_start(folder, node, options)
    sys.stderr.write(f"The agent for {node} runs (pid {pid}); `{config.rn} down` ends it.\n")
    return 0


def _answers(config: Config, node: NodeId) -> bool:
    try:
        return ask_local(config, node, StatusRequest()).ok
    except ReclaimNetError:
        return False
