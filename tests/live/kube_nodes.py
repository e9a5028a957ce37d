"""Nodes for the test cluster: each is a host of the namespace testbed, and runs pods as processes.

What a kubelet does, as far as a pod with one container and no image is concerned: register and
beat, start its command in the host's namespace, report its phase, and honour its grace when it is
deleted.
"""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reclaimnet.adapters.kube.client import LEASES, NODES, PODS, Api, Conflict, now_text
from reclaimnet.adapters.kube.mirror import Mirror
from reclaimnet.adapters.kube.read import time_of
from reclaimnet.adapters.linux.testbed import Testbed
from reclaimnet.errors import NotFound, ReclaimNetError

LOOK_S = 0.1
BEAT_S = 10.0
SIGN = "KUBE_TEST_POD_UID"
"""A variable by which the processes of a pod are known, whoever started them."""
CAPACITY = {"cpu": "16", "memory": "64Gi", "pods": "200"}


@dataclass
class Container:
    """The process of one pod."""

    pod: str
    uid: str
    process: "subprocess.Popen[bytes]"
    log: Path
    kill_at: float | None = None


class Nodes:
    def __init__(
        self, api: Api, bed: Testbed, *, names: list[str], logs: Path, env: dict[str, str]
    ) -> None:
        self._api = api
        self._bed = bed
        self.names = names
        self._logs = logs
        self._env = env
        self._mirror = Mirror(api, {PODS: dict})
        self._containers: dict[str, Container] = {}
        self._over: set[str] = set()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._errors: list[str] = []

    def start(self) -> None:
        for host in (self._bed.hosts[name] for name in self.names):
            self._register(host.name, rack=host.rack, address=str(host.address))
        self._mirror.start()
        for work in (self._serve, self._beat):
            self._threads.append(threading.Thread(target=work, daemon=True))
            self._threads[-1].start()

    def close(self) -> None:
        self._stop.set()
        self._mirror.close()
        for thread in self._threads:
            thread.join()
        for container in self._containers.values():
            _end(container)

    def log(self, pod: str, namespace: str = "default") -> str:
        """What the pod has written, in all of its lives under this name."""
        texts = [path.read_text() for path in sorted(self._logs.glob(f"{namespace}.{pod}.*"))]
        return "".join(texts)

    def forget_logs(self) -> None:
        for path in self._logs.glob("*.log"):
            path.unlink()

    def new_errors(self) -> list[str]:
        """What went wrong since this was last asked."""
        errors, self._errors = self._errors, []
        return errors

    def busy(self) -> bool:
        return bool(self._containers)

    # --- the node ------------------------------------------------------------------------------

    def _register(self, name: str, *, rack: str, address: str) -> None:
        labels = {"kubernetes.io/hostname": name, "rack": rack}
        self._api.create(NODES, {"metadata": {"name": name, "labels": labels}})
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "Up",
            "message": "its namespace is there",
            "lastHeartbeatTime": now_text()[:19] + "Z",
            "lastTransitionTime": now_text()[:19] + "Z",
        }
        status = {
            "capacity": CAPACITY,
            "allocatable": CAPACITY,
            "conditions": [ready],
            "addresses": [{"type": "InternalIP", "address": address}],
        }
        self._api.patch(NODES, name, {"status": status}, status=True)

    def _beat(self) -> None:
        while not self._stop.is_set():
            for name in self.names:
                spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now_text()}
                body = {"metadata": {"name": name}, "spec": spec}
                with self._noting():
                    try:
                        self._api.create(LEASES, body, namespace="kube-node-lease")
                    except Conflict:
                        self._api.patch(LEASES, name, {"spec": spec}, namespace="kube-node-lease")
            self._stop.wait(BEAT_S)

    # --- its pods ------------------------------------------------------------------------------

    def _serve(self) -> None:
        seen = -1
        while not self._stop.is_set():
            seen = self._mirror.await_change(seen, LOOK_S)
            here: dict[str, dict[str, Any]] = {
                item["metadata"]["uid"]: item
                for item in self._mirror.all(PODS)
                if item["spec"].get("nodeName") in self.names
            }
            for uid, item in here.items():
                with self._noting():
                    self._look(uid, item)
            for uid in set(self._containers) - set(here):
                # Deleted without grace: the object is gone, so must be the process.
                _end(self._containers.pop(uid))
            self._over &= set(here)

    def _look(self, uid: str, item: dict[str, Any]) -> None:
        meta = item["metadata"]
        container = self._containers.get(uid)
        leaving = "deletionTimestamp" in meta
        if container is None:
            if leaving:
                self._forget(item)
            elif uid not in self._over:
                self._begin(uid, item)
            return
        code = container.process.poll()
        self._project(uid, item)
        if leaving:
            if code is not None:
                _end(self._containers.pop(uid))
                self._forget(item)
            elif container.kill_at is None:
                left = max(0.0, time_of(meta["deletionTimestamp"]) / 1e9 - time.time())
                container.kill_at = time.monotonic() + left
                container.process.send_signal(signal.SIGTERM)
            elif time.monotonic() >= container.kill_at:
                _end(container)
        elif code is not None:
            self._report(item, "Succeeded" if code == 0 else "Failed", code=code)
            _end(self._containers.pop(uid))
            self._over.add(uid)

    def _begin(self, uid: str, item: dict[str, Any]) -> None:
        try:
            self._containers[uid] = self._run(uid, item)
        except OSError as error:  # no such program, for example
            self._over.add(uid)
            self._report(item, "Failed", code=127, why=str(error))
        else:
            self._report(item, "Running")

    def _run(self, uid: str, item: dict[str, Any]) -> Container:
        meta, spec = item["metadata"], item["spec"]
        (wanted,) = spec["containers"]
        host = self._bed.hosts[spec["nodeName"]]
        fields = {
            "metadata.name": meta["name"],
            "metadata.namespace": meta["namespace"],
            "spec.nodeName": host.name,
            "status.podIP": str(host.address),
        }
        env = {**self._env, SIGN: uid}
        for entry in wanted.get("env") or []:
            source = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            env[entry["name"]] = fields[source] if source else entry.get("value", "")
        for path in self._project(uid, item):
            # No mounts here: a path below one is a path below the pod's own directory.
            root = str(self._logs / uid)
            env = {k: root + v if v.startswith(path + "/") else v for k, v in env.items()}
        argv = [*(wanted.get("command") or []), *(wanted.get("args") or [])]
        for name, value in env.items():
            argv = [word.replace(f"$({name})", value) for word in argv]
        log = self._logs / f"{meta['namespace']}.{meta['name']}.{uid}.log"
        with log.open("ab") as file:
            process = self._bed.run(
                host.name,
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        return Container(pod=meta["name"], uid=uid, process=process, log=log)

    def _project(self, uid: str, item: dict[str, Any]) -> list[str]:
        """Annotations as files, for pods with a downwardAPI volume; where those are mounted."""
        spec, notes = item["spec"], item["metadata"].get("annotations") or {}
        mounts = {m["name"]: m["mountPath"] for m in spec["containers"][0].get("volumeMounts", [])}
        for volume in spec.get("volumes", []):
            for entry in volume.get("downwardAPI", {}).get("items", []):
                key = re.fullmatch(
                    r"metadata\.annotations\['(.+)'\]", entry["fieldRef"]["fieldPath"]
                )
                assert key is not None, "only annotations are projected here"
                folder = self._logs / uid / mounts[volume["name"]].lstrip("/")
                text = notes.get(key[1], "")
                path = folder / entry["path"]
                if not path.exists() or path.read_text() != text:
                    folder.mkdir(parents=True, exist_ok=True)
                    path.with_suffix(".new").write_text(text)
                    path.with_suffix(".new").replace(path)
        return list(mounts.values())

    def _report(self, item: dict[str, Any], phase: str, *, code: int = 0, why: str = "") -> None:
        meta, spec = item["metadata"], item["spec"]
        up = phase == "Running"
        now = now_text()[:19] + "Z"
        state: dict[str, Any] = {"running": {"startedAt": now}}
        if not up:
            ended = {"exitCode": code & 0xFF, "reason": phase, "message": why, "finishedAt": now}
            state = {"terminated": ended}
        kinds = ("Initialized", "Ready", "ContainersReady", "PodScheduled")
        conditions = [
            {
                "type": kind,
                "status": "True" if up or kind in ("Initialized", "PodScheduled") else "False",
                "lastTransitionTime": now,
            }
            for kind in kinds
        ]
        name = spec["containers"][0]["name"]
        image = spec["containers"][0].get("image", "none")
        one = {"name": name, "image": image, "imageID": "", "ready": up, "restartCount": 0}
        address = str(self._bed.hosts[spec["nodeName"]].address)
        status = {
            "phase": phase,
            "podIP": address,
            "hostIP": address,
            "startTime": now,
            "conditions": conditions,
            "containerStatuses": [{**one, "state": state}],
        }
        self._api.patch(
            PODS, meta["name"], {"status": status}, namespace=meta["namespace"], status=True
        )

    def _forget(self, item: dict[str, Any]) -> None:
        meta = item["metadata"]
        self._api.delete(PODS, meta["name"], namespace=meta["namespace"], grace_s=0)

    @contextlib.contextmanager
    def _noting(self) -> Any:
        try:
            yield
        except (NotFound, Conflict):
            pass  # deleted at the same moment
        except ReclaimNetError as error:
            self._errors.append(str(error))


def _end(container: Container) -> None:
    """Its process, and whatever that has started: a container leaves nothing behind."""
    container.process.kill()
    container.process.wait()
    sign = f"{SIGN}={container.uid}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if sign in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
