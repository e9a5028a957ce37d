"""The extender and the controller on a real control plane, with pods as processes in namespaces."""

import contextlib
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest
from tests.live.campus import TRAIN, chain_after
from tests.live.kube_cluster import (
    EXTENDED,
    REPOSITORY,
    Cluster,
    answers_http,
    end,
    running,
)
from tests.live.kube_nodes import Nodes
from tests.live.waiting import until

from reclaimnet.adapters.kube.client import PODS as KUBE_PODS
from reclaimnet.adapters.kube.client import Api
from reclaimnet.adapters.linux import testbed
from reclaimnet.apps import bundle, up
from reclaimnet.apps.client import Gateway
from reclaimnet.apps.config import load
from reclaimnet.apps.testbed import own_network
from reclaimnet.errors import NotFound
from reclaimnet.model.work import JobState

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
COUNT, SETTLING = 26, 8
"""Iterations of a pod that talks, and how many of them are not counted."""

TALKER = """
import socket, sys, time
from reclaimnet import sdk
peer, port, compute, size, count = sys.argv[1], *map(float, sys.argv[2:6])
talk = socket.create_connection((peer, int(port)))
data = b"x" * int(size)
with sdk.job() as job:
    begun = time.monotonic()
    for _ in range(int(count)):
        job.iteration()
        at = time.time_ns()
        time.sleep(compute)
        talk.sendall(data)
        assert talk.recv(1) == b"k"
        begun, before = time.monotonic(), begun
        print(begun - before, at, flush=True)
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
    api: Api
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
        self.cluster.kubectl("delete", "rhythms,replicasets", "--all", check=False)
        for name in self.pods():
            with contextlib.suppress(NotFound):
                self.api.delete(KUBE_PODS, name, namespace="default", grace_s=0)
        until(lambda: not self.pods(), "all pods are gone")
        self.cluster.kubectl("uncordon", *self.nodes.names)
        until(lambda: not self.nodes.busy(), "their processes are gone")


@pytest.fixture(scope="module")
def bed() -> Iterator[testbed.Testbed]:
    racks = (
        testbed.Rack(name="a", hosts=2, uplink=UPLINK),
        testbed.Rack(name="b", hosts=2, uplink=UPLINK),
        testbed.Rack(name="c", hosts=1),
    )
    network = IPv4Network(own_network())
    campus = testbed.Campus(racks=racks, lanes=False, management=True, network=network)
    with testbed.up(campus, f"k{os.getpid() % 10**7}") as found:
        yield found


@dataclass
class Campus:
    """`rn up` where both the cluster's nodes and its controller reach it."""

    env: dict[str, str]
    nats_url: str
    gateway: Gateway
    token_file: Path


@pytest.fixture(scope="module")
def campus(tmp_path_factory: pytest.TempPathFactory, bed: testbed.Testbed) -> Iterator[Campus]:
    home = tmp_path_factory.mktemp("campus")
    env = {k: v for k, v in os.environ.items() if not k.startswith("RECLAIMNET_")}
    env |= {"XDG_STATE_HOME": str(home / "state"), "XDG_CONFIG_HOME": str(home / "config")}
    env |= {"PYTHONPATH": str(REPOSITORY / "src")}
    config = load(env=env, project=home / "none", system=home / "none")
    try:
        argv = [sys.executable, "-m", "reclaimnet.apps.cli", "up", "--gateway-port", "0"]
        argv += ["--listen", str(bed.address)]
        subprocess.run(argv, env=env, check=True, capture_output=True, timeout=60)
        left = json.loads((config.state / "campus.json").read_text())
        config = load(env=env, project=home / "none", system=home / "none")
        yield Campus(env, left["nats_url"], Gateway(config), config.state / "join-token")
    finally:
        up.end_all(config)


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, bed: testbed.Testbed, campus: Campus
) -> Iterator[World]:
    home = tmp_path_factory.mktemp("kube")
    with running(home) as cluster:
        unknown = _refused(cluster, "kube", "extender", "--kubeconfig", str(cluster.kubeconfig))
        cluster.kubectl("apply", "-k", "deploy/kubernetes")
        # Their images are nowhere: here both run as processes, with their own accounts.
        cluster.kubectl("delete", "deployments", "--all", "-n", "reclaimnet-system")
        _run_extender(cluster)
        _run_controller(cluster, campus)
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
            yield World(cluster, api, nodes, bed, unknown)
        finally:
            nodes.close()
            api.close()


@pytest.fixture
def world(made: World) -> Iterator[World]:
    try:
        yield made
    finally:
        made.clear()
    assert not made.nodes.new_errors()


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


def _run_controller(cluster: Cluster, campus: Campus) -> None:
    account = cluster.account("reclaimnet-controller")
    config = {name: campus.env[name] for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME")}
    cluster.rn("controller", "kube", "controller", "--kubeconfig", str(account), **config)
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
                len(world.cluster.get("link", f"uplink-{rack}").get("status", {}).get("jobs", []))
                == min(len(here), 100)
            ),
            "the links know who talks over them",
        )


def test_a_conflict_that_the_stock_scheduler_runs_into_is_avoided(world: World) -> None:
    """The same pods twice: two that talk 60 % of their time, and one without a rhythm that makes
    the other rack look busier."""
    took: dict[str, float] = {}
    for scheduler in (STOCK, EXTENDED):
        with talking(world, compute=0.12, burst=0.18) as command:
            for name in ("a2", "b2"):
                world.cluster.kubectl("cordon", name)
            world.run(
                rhythm("heavy", "300ms", "180ms", "50M"),
                pod("ballast", cpu="8", memory="32Gi", nodeName="b1"),
            )
            world.where("ballast")
            for name in ("one", "two"):
                world.run(pod(name, command=command, rhythm="heavy", scheduler=scheduler))
                world.where(name)
            places = world.where("one", "two")
            together = places["one"] == places["two"]
            assert together == (scheduler == STOCK), f"{scheduler}: {places}"
            _see_conflict(world, conflict=together)
            took[scheduler] = usual_iteration(world, "one", "two")
    print(f"usual iteration: {took}")
    assert took[STOCK] > 1.1 * took[EXTENDED]


def test_pods_with_the_sdk_keep_the_rotation_that_the_controller_tells_them(world: World) -> None:
    """Two that fit on one link: their iterations begin where the plan has them, a burst apart."""
    compute, burst = 0.18, 0.12
    with talking(world, compute=compute, burst=burst) as command:
        for name in ("one", "two"):
            given = pod(name, command=command, rhythm="300ms: 120ms@50M", nodeName="a1")
            _tell_rotation(given)
            world.run(given)

        def a_burst_apart() -> dict[str, Any] | None:
            """They are told one after the other, so one may still have what it had alone."""
            notes = {name: item["metadata"]["annotations"] for name, item in world.pods().items()}
            if not all("reclaimnet.io/rotation" in each for each in notes.values()):
                return None
            told = {name: json.loads(notes[name]["reclaimnet.io/rotation"]) for name in notes}
            period = told["one"]["period"]
            apart = (told["one"]["anchor"] - told["two"]["anchor"]) % period
            fits = burst * 1e9 <= apart <= period - burst * 1e9
            return told if fits and period == told["two"]["period"] else None

        told = until(a_burst_apart, "both have rotations that keep their bursts apart")
        usual = usual_iteration(world, "one", "two")
        begun = {name: [int(at) for _, at in talks(world, name)] for name in told}
    period = told["one"]["period"]
    late = {
        name: statistics.median((at - told[name]["anchor"]) % period for at in times)
        for name, times in begun.items()
    }
    print(f"usual iteration {usual:.3f} s of {period / 1e9:.3f} s, late by {late}")
    assert max(late.values()) < period // 8


def _tell_rotation(given: dict[str, Any]) -> None:
    """As a pod's author would: the annotation as a file, and where it is."""
    source = {"fieldPath": "metadata.annotations['reclaimnet.io/rotation']"}
    items = [{"path": "rotation", "fieldRef": source}]
    given["spec"]["volumes"] = [{"name": "rhythm", "downwardAPI": {"items": items}}]
    (container,) = given["spec"]["containers"]
    container["volumeMounts"] = [{"name": "rhythm", "mountPath": "/etc/rhythm"}]
    container["env"] = [{"name": "RN_ROTATION_FILE", "value": "/etc/rhythm/rotation"}]


@contextlib.contextmanager
def talking(world: World, *, compute: float, burst: float) -> Iterator[list[str]]:
    """The command of a pod that talks over its rack's uplink; afterwards all is as before."""
    size = int(UPLINK * burst * 0.94)
    listener = world.bed.run(
        "c1", [sys.executable, "-c", LISTENER, str(size)], stdout=subprocess.PIPE
    )
    try:
        assert listener.stdout is not None
        port = int(listener.stdout.readline())
        address = str(world.bed.hosts["c1"].address)
        yield [
            sys.executable, "-c", TALKER, address, str(port), str(compute), str(size), str(COUNT)
        ]  # fmt: skip
    finally:
        end(listener)
        listener.stdout.close()
        world.clear()
        world.nodes.forget_logs()


def usual_iteration(world: World, *pods: str) -> float:
    """Of those that have talked to their end, the mean without the first ones; and without the
    slowest tenth, since one stall of a busy machine is more than what a conflict costs."""
    until(
        lambda: all(world.pods()[name]["status"]["phase"] == "Succeeded" for name in pods),
        "all have talked",
    )
    took = sorted(float(took) for name in pods for took, _ in talks(world, name))
    return statistics.mean(took[: -max(1, len(took) // 10)])


def talks(world: World, pod: str) -> list[list[str]]:
    """How long each iteration took and when it began, without the first ones."""
    return [line.split() for line in world.nodes.log(pod).splitlines()[SETTLING:]]


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
        world.where(name)
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
    """Beside the one that all tests use, which they must not disturb: with a lease of their own."""

    def holder() -> str:
        found = world.cluster.get("leases", "-n", "default")["items"]
        return str(found[0]["spec"]["holderIdentity"]) if found else ""

    def start(name: str) -> "subprocess.Popen[bytes]":
        admin = str(world.cluster.kubeconfig)
        arguments = ("--kubeconfig", admin, "--namespace", "default", "--identity", name)
        return world.cluster.rn(name, "kube", "controller", *arguments)

    first = start("one-of-two")
    second = None
    try:
        until(lambda: holder() == "one-of-two", "the first has the lease")
        second = start("two-of-two")
        world.run(pod("early", rhythm="200ms: 20ms@10M"))
        until(lambda: world.cluster.events("early", "RhythmFits"), "somebody acts")
        assert holder() == "one-of-two"
        assert "we act now" not in world.cluster.log("two-of-two")
        end(first)
        until(lambda: "we act now" in world.cluster.log("two-of-two"), "the second acts")
        assert holder() == "two-of-two"
        (told,) = world.cluster.events("early", "RhythmFits")
        assert "side by side on uplink-" in told, "said once, however many controllers there are"
    finally:
        for process in (first, second):
            if process is not None:
                end(process)


def test_without_the_api_server_old_knowledge_serves_and_later_all_is_made_good(
    world: World,
) -> None:
    heavy = "300ms: 180ms@50M"
    world.run(pod("before", rhythm=heavy, nodeName="a1"))
    until(lambda: world.cluster.events("before", "RhythmFits"), "its rhythm is known")
    world.cluster.wire.cut()
    try:
        world.run(pod("meanwhile", rhythm=heavy))
        assert world.where("meanwhile")["meanwhile"].startswith("b"), "the extender still knows"
        until(lambda: "does not answer" in world.cluster.log("controller"), "that is said")
    finally:
        world.cluster.wire.mend()
    until(lambda: world.cluster.events("meanwhile", "RhythmFits"), "the controller is back")


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


def test_the_commands_of_the_documentation_work(world: World) -> None:
    text = (REPOSITORY / "docs" / "kubernetes.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) >= 10
    said: dict[str, str] = {}
    try:
        for line in lines:
            program, *arguments = shlex.split(line)
            if program == "kubectl":
                said[line] = world.cluster.kubectl(*arguments)
            else:
                assert program == "rn"
                _rn_knows(world.cluster, arguments)

        def shown() -> bool:
            links, rhythms = world.cluster.kubectl("get", "links"), world.cluster.get("rhythms")
            (vgg16,) = rhythms["items"]
            fits = condition(vgg16, "Fits")["status"] == "True"
            return "rack-a" in links and fits and vgg16["status"]["jobs"] == 1

        until(shown, "links and rhythms are shown with their status")
        assert len(world.cluster.events("worker-0", "RhythmFits")) >= 1
    finally:
        world.cluster.kubectl("delete", "-f", "examples/kubernetes/links.yaml", check=False)
        world.cluster.kubectl("delete", "deployments", "--all", "-n", "reclaimnet-system")


def _rn_knows(cluster: Cluster, arguments: list[str]) -> None:
    """A command that runs until it is ended: its options exist."""
    done = subprocess.run(
        [sys.executable, "-m", "reclaimnet.apps.cli", *arguments, "--help"],
        env=cluster.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for word in arguments:
        assert not word.startswith("--") or word in done.stdout


def test_the_example_of_lent_pods_is_what_the_api_server_takes(world: World) -> None:
    said = world.cluster.kubectl("apply", "--dry-run=server", "-f", "examples/kubernetes/lent.yaml")
    assert "deployment.apps/lent created" in said


# --- pods that are lent ------------------------------------------------------------------------

GRACE_S = 60


def agents(campus: Campus, home: Path) -> dict[str, Any]:
    """Two pods on two nodes, each with an agent in it that is lent to the campus pool."""
    argv = [sys.executable, "-m", "reclaimnet.apps.cli", "--state", f"{home}/$(POD_NAME)", "agent"]
    argv += ["--join", campus.nats_url, "--token-file", str(campus.token_file), "--gpus", "1"]
    argv += ["--name", "$(POD_NAME)", "--address", "$(POD_IP)", "--grace", f"{GRACE_S - 10}s"]
    fields = {"POD_NAME": "metadata.name", "POD_IP": "status.podIP"}
    labels = {"app": "lent"}
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}}
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {"name": "lent", "namespace": "default"},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels, "annotations": {"reclaimnet.io/lend": "true"}},
                "spec": {
                    "schedulerName": EXTENDED,
                    "terminationGracePeriodSeconds": GRACE_S,
                    "affinity": {
                        "podAntiAffinity": {
                            "requiredDuringSchedulingIgnoredDuringExecution": [apart]
                        }
                    },
                    "containers": [
                        {
                            "name": "agent",
                            "image": "none",
                            "command": argv,
                            "env": [
                                {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
                                for name, path in fields.items()
                            ],
                        }
                    ],
                },
            },
        },
    }


def test_a_drained_nodes_pods_move_on_with_their_state(
    world: World, campus: Campus, tmp_path: Path
) -> None:
    gateway = campus.gateway
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text(TRAIN)
    shipped = gateway.ship(bundle.pack(work))

    def submit(name: str) -> str:
        command = [sys.executable, "train.py", "100000", "0.05", "0", "1"]
        env = {"LEDGER": str(tmp_path / name)}
        fields = {"name": name, "user": "test", "command": command, "gpus": 1}
        return gateway.submit({**fields, "bundle": shipped, "env": env}).id

    def running_on(job: str, *, other_than: str = "") -> str:
        def found() -> str | None:
            record = gateway.job(job)
            assert not record.state.terminal, f"{record.state}: {record.reason}"
            runs = record.state is JobState.RUNNING and record.step > 10
            return record.holder if runs and record.holder != other_than else None

        return str(until(found, f"{job} runs"))

    def node_of(agent: str) -> str:
        return str(world.pods()[agent]["spec"]["nodeName"])

    def vacant() -> int:
        return sum(len(node.card.vacant) for node in gateway.nodes() if node.age_s < 5)

    (tmp_path / "agents").mkdir()
    world.run(agents(campus, tmp_path / "agents"))
    until(lambda: vacant() == 2, "both pods are lent")
    first = submit("first")
    pod_before = running_on(first)
    until(lambda: world.cluster.events(pod_before, "Lent"), "that it is lent is on the pod")

    # Cordoning is a notice: the guest leaves, and what was lent is lent again afterwards.
    node = node_of(pod_before)
    world.cluster.kubectl("cordon", node)
    (said,) = until(
        lambda: world.cluster.events(pod_before, "NoticeGiven"), "the notice is on the pod"
    )
    assert said.startswith(f"node {node} is cordoned: guests have ")
    pod_between = running_on(first, other_than=pod_before)
    world.cluster.kubectl("uncordon", node)
    # It may be over at the very moment at which it is withdrawn, since the guest has left.
    until(
        lambda: any(
            world.cluster.events(pod_before, told) for told in ("NoticeWithdrawn", "NotWithdrawn")
        ),
        "the notice is withdrawn",
    )
    until(lambda: vacant() == 1, "the pod is lent again")

    # With no room left, the only place to go is the pod that replaces the drained one.
    second = submit("second")
    assert running_on(second) == pod_before
    node = node_of(pod_between)
    world.cluster.kubectl("drain", node, "--ignore-daemonsets", f"--timeout={GRACE_S}s")
    assert pod_between not in world.pods()
    pod_after = running_on(first, other_than=pod_between)
    assert pod_after not in (pod_before, pod_between)
    assert node_of(pod_after) not in (node, node_of(pod_before))

    assert gateway.job(first).moves >= 2
    assert gateway.job(first).steps_lost == 0
    for job, name in ((first, "first"), (second, "second")):
        gateway.cancel(job)
        until(lambda job=job: gateway.job(job).state.terminal, f"{name} ends")
        steps, chain = ledger(tmp_path / name)
        assert steps == list(range(1, len(steps) + 1)), "no step was lost, or taken twice"
        assert chain == chain_after(len(steps)), "what was restored is what was saved"
    world.cluster.kubectl("delete", "replicaset", "lent")
    until(lambda: not world.pods(), "the agents have ended in peace")


def ledger(path: Path) -> tuple[list[int], str]:
    """The steps that all attempts took, and what the last of them ended with."""
    rows = [line.split() for line in path.read_text().splitlines()]
    return [int(step) for _, step, _ in rows], rows[-1][2]
