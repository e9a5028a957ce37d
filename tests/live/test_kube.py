"""The extender and the controller on a real control plane, with pods as processes in namespaces."""

import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Any

import pytest

kubernetes = pytest.importorskip("lightkube", reason="needs lightkube")

from tests.live.kube_cluster import (  # noqa: E402
    EXTENDED,
    Cluster,
    answers_http,
    end,
    running,
    until,
)
from tests.live.kube_nodes import Nodes  # noqa: E402

from reclaimnet.adapters.kube.client import Api  # noqa: E402
from reclaimnet.adapters.linux import testbed  # noqa: E402

pytestmark = [
    pytest.mark.needs("root"),
    pytest.mark.needs("netns"),
    pytest.mark.needs("htb"),
    pytest.mark.needs("kubernetes"),
]

STOCK = "default-scheduler"
UPLINK = 6_250_000
"""Bytes a second of each rack's uplink, 50 Mbit/s: a busy machine still fills it."""
PODS = 100

TALKER = """
import socket, sys, time
peer, port, compute, size, count = sys.argv[1], *map(float, sys.argv[2:6])
talk = socket.create_connection((peer, int(port)))
data = b"x" * int(size)
for _ in range(int(count)):
    begun = time.monotonic()
    time.sleep(compute)
    talk.sendall(data)
    assert talk.recv(1) == b"k"
    print(time.monotonic() - begun, flush=True)
"""
LISTENER = """
import socket, sys, threading
door = socket.create_server(("", 0))
size = int(sys.argv[1])
def serve(talk):
    while True:
        left = size
        while left:
            got = len(talk.recv(min(left, 1 << 16)))
            if not got:
                return
            left -= got
        talk.sendall(b"k")
print(door.getsockname()[1], flush=True)
while True:
    threading.Thread(target=serve, args=(door.accept()[0],), daemon=True).start()
"""


@dataclass
class World:
    cluster: Cluster
    nodes: Nodes
    bed: testbed.Testbed
    unknown_kinds: str
    """What the extender said before the cluster knew our kinds."""

    def run(self, *pods: dict[str, Any]) -> None:
        self.cluster.apply(*pods)

    def pods(self) -> dict[str, dict[str, Any]]:
        items = self.cluster.get("pods")["items"]
        return {item["metadata"]["name"]: item for item in items}

    def where(self, *names: str) -> dict[str, str]:
        """The nodes of these pods, once all are bound."""

        def bound() -> dict[str, str] | None:
            found = self.pods()
            places = {name: found[name]["spec"].get("nodeName") for name in names}
            return places if all(places.values()) else None

        return dict(until(bound, f"{len(names)} pods are bound"))

    def clear(self) -> None:
        self.cluster.kubectl(
            "delete", "pods,rhythms,replicasets,pdb", "--all", "--grace-period=0", "--force",
            check=False,
        )  # fmt: skip
        until(lambda: not self.pods(), "all pods are gone")
        for name in self.nodes.names:
            self.cluster.kubectl("uncordon", name)
        until(lambda: not self.nodes.busy(), "their processes are gone")


@pytest.fixture(scope="module")
def bed() -> Iterator[testbed.Testbed]:
    racks = (
        testbed.Rack(name="a", hosts=2, uplink=UPLINK),
        testbed.Rack(name="b", hosts=2, uplink=UPLINK),
        testbed.Rack(name="c", hosts=1),
    )
    network = IPv4Network(f"10.{100 + os.getpid() % 100}.0.0/16")
    campus = testbed.Campus(racks=racks, lanes=False, management=True, network=network)
    with testbed.up(campus, f"k{os.getpid() % 10**7}") as found:
        yield found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, bed: testbed.Testbed) -> Iterator[World]:
    home = tmp_path_factory.mktemp("kube")
    with running(home) as cluster:
        unknown = _refused(cluster, "kube", "extender", "--kubeconfig", str(cluster.kubeconfig))
        cluster.kubectl("apply", "-k", "deploy/kubernetes")
        # Their images are nowhere: here both run as processes, with their own accounts.
        cluster.kubectl("delete", "deployments", "--all", "-n", "reclaimnet-system")
        _run_extender(cluster)
        _run_controller(cluster)
        (home / "logs").mkdir()
        api = Api(kubeconfig=cluster.kubeconfig)
        nodes = Nodes(
            api,
            bed,
            names=["a1", "a2", "b1", "b2"],
            logs=home / "logs",
            env=cluster.environment(),
        )
        try:
            nodes.start()
            for rack in ("a", "b"):
                cluster.apply(link(f"uplink-{rack}", "50M", rack=rack))
            yield World(cluster, nodes, bed, unknown)
        finally:
            nodes.close()
            api.close()


@pytest.fixture
def world(made: World) -> Iterator[World]:
    try:
        yield made
    finally:
        made.clear()
    assert not made.nodes.errors


def _refused(cluster: Cluster, *arguments: str) -> str:
    argv = [sys.executable, "-m", "reclaimnet.apps.cli", *arguments]
    done = subprocess.run(
        argv, env=cluster.environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    return done.stderr


def _run_extender(cluster: Cluster) -> None:
    account = cluster.account("reclaimnet-extender")
    url = f"127.0.0.1:{cluster.extender_port}"
    cluster.rn("extender", "kube", "extender", "--kubeconfig", str(account), "--listen", url)
    until(lambda: answers_http(f"http://{url}/healthz"), "the extender answers")


def _run_controller(cluster: Cluster) -> None:
    account = cluster.account("reclaimnet-controller")
    cluster.rn(
        "controller", "kube", "controller", "--kubeconfig", str(account), "--identity", "first"
    )
    until(lambda: "we act now" in cluster.log("controller"), "the controller has its lease")


def link(name: str, rate: str, *, rack: str) -> dict[str, Any]:
    return {
        "apiVersion": "reclaimnet.io/v1alpha1",
        "kind": "Link",
        "metadata": {"name": name},
        "spec": {"rate": rate, "nodeSelector": {"matchLabels": {"rack": rack}}},
    }


def rhythm(name: str, period: str, length: str, rate: str) -> dict[str, Any]:
    return {
        "apiVersion": "reclaimnet.io/v1alpha1",
        "kind": "Rhythm",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"period": period, "bursts": [{"length": length, "rate": rate}]},
    }


def pod(
    name: str, *, command: list[str] | None = None, rhythm: str = "", scheduler: str = EXTENDED,
    cpu: str = "100m", memory: str = "400Mi", **spec: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "annotations": {"reclaimnet.io/rhythm": rhythm} if rhythm else {},
        },
        "spec": {
            "schedulerName": scheduler,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 5,
            "containers": [
                {
                    "name": "main",
                    "image": "none",
                    "command": command or ["sleep", "600"],
                    "resources": {"requests": {"cpu": cpu, "memory": memory}},
                }
            ],
            **spec,
        },
    }


def condition(item: dict[str, Any], kind: str) -> dict[str, Any]:
    found = item.get("status", {}).get("conditions") or []
    return next((one for one in found if one["type"] == kind), {"status": "", "reason": ""})


def metric(world: World, name: str) -> float:
    url = f"http://127.0.0.1:{world.cluster.extender_port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


# --- the tests -------------------------------------------------------------------------------


def test_a_cluster_that_does_not_know_our_kinds_is_told_how_to_learn_them(world: World) -> None:
    (line,) = world.unknown_kinds.splitlines()
    assert "kubectl apply -k deploy/kubernetes" in line


def test_a_hundred_pods_are_bound_through_the_extender_by_the_stock_scheduler(
    world: World,
) -> None:
    before = metric(world, 'reclaimnet_kube_filtered_pods_total{rhythm="yes"}')
    begun = time.monotonic()
    world.run(*(pod(f"p{i:03d}", rhythm="200ms: 4ms@1M") for i in range(PODS)))
    places = world.where(*(f"p{i:03d}" for i in range(PODS)))
    print(f"{PODS} pods bound in {time.monotonic() - begun:.2f} s")
    assert metric(world, 'reclaimnet_kube_filtered_pods_total{rhythm="yes"}') - before >= PODS
    assert set(places.values()) == set(world.nodes.names)
    until(
        lambda: sum(item["status"]["phase"] == "Running" for item in world.pods().values()) == PODS,
        "all of them run",
    )
    for rack in ("a", "b"):
        here = [name for name, node in places.items() if node.startswith(rack)]
        until(
            lambda rack=rack, here=here: (
                len(world.cluster.get("link", f"uplink-{rack}")["status"]["jobs"])
                == min(len(here), 100)
            ),
            "the links know who talks over them",
        )


def test_a_conflict_that_the_stock_scheduler_runs_into_is_avoided(world: World) -> None:
    """The same pods twice: two that talk 60 % of their time, and one without a rhythm that makes
    the other rack look busier."""
    compute, burst = 0.12, 0.18
    size = int(UPLINK * burst * 0.94)
    took: dict[str, float] = {}
    for scheduler in (STOCK, EXTENDED):
        listener = world.bed.run(
            "c1", [sys.executable, "-c", LISTENER, str(size)], stdout=subprocess.PIPE
        )
        try:
            assert listener.stdout is not None
            port = int(listener.stdout.readline())
            talks = [
                sys.executable, "-c", TALKER, str(world.bed.hosts["c1"].address), str(port),
                str(compute), str(size), "24",
            ]  # fmt: skip
            for name in ("a2", "b2"):
                world.cluster.kubectl("cordon", name)
            world.run(
                rhythm("heavy", "300ms", "180ms", "50M"),
                pod("ballast", cpu="8", memory="32Gi", nodeName="b1"),
            )
            world.where("ballast")
            for name in ("one", "two"):
                world.run(pod(name, command=talks, rhythm="heavy", scheduler=scheduler))
                world.where(name)
            places = world.where("one", "two")
            together = places["one"] == places["two"]
            assert together == (scheduler == STOCK), f"{scheduler}: {places}"
            _see_conflict(world, conflict=together)
            until(
                lambda: all(
                    world.pods()[name]["status"]["phase"] == "Succeeded" for name in ("one", "two")
                ),
                "both have talked",
            )
            iterations = [
                float(line) for name in ("one", "two") for line in world.nodes.log(name).split()[3:]
            ]
            took[scheduler] = statistics.mean(iterations)
        finally:
            end(listener)
            listener.stdout.close()
            world.clear()
            world.nodes.forget_logs()
    print(f"mean iteration: {took}")
    assert took[STOCK] > 1.1 * took[EXTENDED]


def _see_conflict(world: World, *, conflict: bool) -> None:
    """Conditions and events say what the plan expects."""
    expected = ("False", "Overfull") if conflict else ("True", "BurstsFit")

    def said() -> bool:
        links = world.cluster.get("links")["items"]
        seen = {
            (one["status"], one["reason"])
            for item in links
            if item.get("status", {}).get("jobs")
            for one in [condition(item, "Compatible")]
        }
        fits = condition(world.cluster.get("rhythm", "heavy"), "Fits")
        return seen == {expected} and fits["status"] == expected[0]

    until(said, f"links and rhythm are {expected}")
    reason = "RhythmConflict" if conflict else "RhythmFits"
    until(lambda: world.cluster.events("two", reason), f"the pod has an event {reason}")


def test_low_is_refused_with_a_reason_where_high_is_not(world: World) -> None:
    heavy = "300ms: 180ms@50M"
    low = {"priorityClassName": "reclaimnet-low"}
    for name in ("one", "two"):
        world.run(pod(name, rhythm=heavy, **low))
    places = world.where("one", "two")
    assert {node[0] for node in places.values()} == {"a", "b"}, "each on a link of its own"
    world.run(pod("third", rhythm=heavy, **low))

    def refusal() -> bool:
        said = " ".join(world.cluster.events("third", "FailedScheduling"))
        return "uplink-a: bursts of 2 jobs do not fit" in said and "uplink-b: bursts" in said

    until(refusal, "the scheduler says why the third is not placed")
    assert not world.pods()["third"]["spec"].get("nodeName")
    world.run(pod("high", rhythm=heavy, priorityClassName="reclaimnet-high"))
    world.where("high")
    assert world.pods()["high"]["spec"]["priority"] == 1000
    world.cluster.kubectl("delete", "pod", "one", "high", "--now")
    world.where("third")  # there is room again


def test_a_rhythm_that_cannot_be_read_is_said_and_does_not_keep_a_pod_waiting(
    world: World,
) -> None:
    world.run(pod("odd", rhythm="200ms: often"), pod("lost", rhythm="no-such-rhythm"))
    world.where("odd", "lost")
    until(lambda: world.cluster.events("odd", "RhythmUnreadable"), "what is wrong is said")
    (said,) = until(
        lambda: world.cluster.events("lost", "RhythmUnreadable"), "what is missing is said"
    )
    assert said == "there is no Rhythm no-such-rhythm in namespace default"
    bad = rhythm("bad", "often", "10ms", "1G")
    refused = world.cluster.kubectl("create", "-f", "-", text=json.dumps(bad), check=False)
    assert "spec.period" in refused


def test_of_two_controllers_one_acts_and_the_other_takes_over(world: World) -> None:
    account = str(world.cluster.home / "reclaimnet-controller.conf")

    def holder() -> str:
        lease = world.cluster.get("lease", "reclaimnet-controller", "-n", "reclaimnet-system")
        return str(lease["spec"]["holderIdentity"])

    assert holder() == "first"
    second = world.cluster.rn(
        "second", "kube", "controller", "--kubeconfig", account, "--identity", "second"
    )
    try:
        first = world.cluster.process("controller")
        end(first)
        until(lambda: holder() == "second", "the second has the lease")
        world.run(pod("late", rhythm="200ms: 20ms@10M"))
        until(lambda: world.cluster.events("late", "RhythmFits"), "the second acts")
    finally:
        end(second)
        _run_controller(world.cluster)
    assert holder() == "first"


def test_our_accounts_may_do_what_they_need_and_no_more(world: World) -> None:
    account = "--as=system:serviceaccount:reclaimnet-system:reclaimnet-controller"
    for verb, what in (
        ("delete", "pods"),
        ("create", "pods"),
        ("patch", "nodes"),
        ("get", "secrets"),
    ):
        said = world.cluster.kubectl("auth", "can-i", verb, what, account, check=False)
        assert said.startswith("no"), f"{verb} {what}"
    assert "forbidden" not in world.cluster.log("controller")
    assert "forbidden" not in world.cluster.log("extender")
