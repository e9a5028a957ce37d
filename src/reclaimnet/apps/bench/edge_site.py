"""What the benches and tests of the edge share: who sends and receives on a testbed."""

import json
import select
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from reclaimnet.adapters.linux import tc_netns, testbed
from reclaimnet.apps.bench import edge_traffic
from reclaimnet.errors import Unavailable

_READY_SECONDS: Final = 30.0
_RTAX_RTO_MIN: Final = 13


def start(
    bed: testbed.Testbed, host: str, role: str, options: dict[str, Any], *, lane: bool = False
) -> "subprocess.Popen[Any]":
    """One of `edge_traffic`'s roles on a host of the testbed."""
    argv = [sys.executable, "-I", "-S", edge_traffic.__file__, role, json.dumps(options)]
    return bed.run(
        host,
        argv,
        lane=lane,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def start_ready(
    bed: testbed.Testbed, host: str, role: str, options: dict[str, Any], *, lane: bool = False
) -> "subprocess.Popen[Any]":
    """The same for a server; returns when it listens."""
    process = start(bed, host, role, options, lane=lane)
    assert process.stdout is not None, "start asked for a pipe"
    if not select.select([process.stdout], [], [], _READY_SECONDS)[0]:
        raise Unavailable(f"The bench's {role} did not start.")
    if process.stdout.readline() != b"ready\n":
        raise Unavailable(f"The bench's {role} failed to start on {host}.")
    return process


def set_retransmit_floor(netns: Path, network: str, floor_ms: int) -> None:
    """Let TCP try again soon after a stop, so that the next flip need not wait for it."""

    def change() -> None:
        with tc_netns.IPRoute() as route:
            index = route.link_lookup(ifname=testbed.GUEST_INTERFACE)[0]
            route.route(
                "replace",
                dst=network,
                oif=index,
                metrics={"lock": 1 << _RTAX_RTO_MIN, "rto_min": floor_ms},
            )

    tc_netns.inside(netns, change)


def available_congestion() -> list[str]:
    """The kernel's ways to control congestion."""
    path = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    return path.read_text().split()
