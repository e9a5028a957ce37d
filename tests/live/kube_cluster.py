"""A real Kubernetes control plane for one test module: etcd, API server, controllers, schedulers.

Everything listens on loopback, on ports that were free, and ends by pid. Its programs come from
scripts/get-kubernetes.
"""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from tests.live.campus import Wire
from tests.live.ports import free_port
from tests.live.waiting import until

from reclaimnet.adapters.kube.client import NODES, Api
from reclaimnet.errors import ReclaimNetError

REPOSITORY = Path(__file__).parents[2]
END_S = 15.0
ADMIN = "admin-token"
EXTENDED = "with-extender"
"""The name of the scheduler that asks an extender; the other one is left as it is."""


def programs() -> Path:
    """Where scripts/get-kubernetes has put them; the test needs `kubernetes`, so they are there."""
    script = REPOSITORY / "scripts" / "get-kubernetes"
    done = subprocess.run([script, "--check"], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


class Cluster:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.bin = programs()
        self.port = free_port()
        self.extender_port = free_port()
        self.kubeconfig = home / "admin.conf"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ours: list[subprocess.Popen[bytes]] = []
        self.wire = Wire(f"tcp://127.0.0.1:{self.port}")
        """What our own programs reach the API server through."""

    # --- starting and ending -------------------------------------------------------------------

    def start(self) -> None:
        self._write_files()
        etcd_port, peer_port = free_port(), free_port()
        client = f"http://127.0.0.1:{etcd_port}"
        self.run(
            "etcd",
            shutil.which("etcd") or "etcd",
            "--data-dir", str(self.home / "etcd"),
            "--listen-client-urls", client,
            "--advertise-client-urls", client,
            "--listen-peer-urls", f"http://127.0.0.1:{peer_port}",
            "--unsafe-no-fsync",
        )  # fmt: skip
        self.run(
            "apiserver",
            str(self.bin / "kube-apiserver"),
            f"--etcd-servers={client}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            "--insecure-port=0",
            f"--cert-dir={self.home / 'certs'}",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--authorization-mode=RBAC",
            f"--token-auth-file={self.home / 'tokens.csv'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.home / 'sa.pub'}",
            f"--service-account-signing-key-file={self.home / 'sa.key'}",
            "--endpoint-reconciler-type=none",
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
        )
        until(self._answers, "the API server is ready")
        self.run(
            "controllers",
            str(self.bin / "kube-controller-manager"),
            f"--kubeconfig={self.kubeconfig}",
            f"--service-account-private-key-file={self.home / 'sa.key'}",
            f"--root-ca-file={self.home / 'certs' / 'apiserver.crt'}",
            "--leader-elect=false",
            "--port=0",
            "--secure-port=0",
        )
        self._run_scheduler("default-scheduler", [])
        extender = {
            "urlPrefix": f"http://127.0.0.1:{self.extender_port}",
            "filterVerb": "filter",
            "prioritizeVerb": "prioritize",
            "weight": 10,
            "nodeCacheCapable": True,
            "enableHTTPS": False,
            "httpTimeout": "10s",
        }
        self._run_scheduler(EXTENDED, [extender])

    def _run_scheduler(self, name: str, extenders: list[dict[str, Any]]) -> None:
        health = f"127.0.0.1:{free_port()}"
        config = {
            "apiVersion": "kubescheduler.config.k8s.io/v1beta1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            "clientConnection": {"kubeconfig": str(self.kubeconfig)},
            "healthzBindAddress": health,
            "metricsBindAddress": health,
            "podInitialBackoffSeconds": 1,
            "podMaxBackoffSeconds": 2,
            "profiles": [{"schedulerName": name}],
            "extenders": extenders,
        }
        path = self.home / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        program = str(self.bin / "kube-scheduler")
        self.run(name, program, f"--config={path}", "--secure-port=0")
        until(lambda: answers_http(f"http://{health}/healthz"), f"{name} is ready")

    def run(
        self, name: str, *argv: str, env: dict[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        with (self.home / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd=self.home
            )
        self._processes.append(process)
        return process

    def rn(self, name: str, *arguments: str, **env: str) -> "subprocess.Popen[bytes]":
        """A program of ours, kept until the end."""
        argv = [sys.executable, "-m", "reclaimnet.apps.cli", *arguments]
        process = self.run(name, *argv, env=self.environment(**env))
        self._ours.append(process)
        return process

    def environment(self, **more: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RECLAIMNET_", "KUBE"))}
        return {**kept, "PYTHONPATH": str(REPOSITORY / "src"), **more}

    def log(self, name: str) -> str:
        return (self.home / f"{name}.log").read_text(errors="replace")

    def end(self) -> None:
        """Ours in peace; the others at once, since nothing they keep is needed again."""
        for process in self._ours:
            end(process)
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        self._processes.clear()
        self.wire.close()

    # --- what people do ------------------------------------------------------------------------

    def kubectl(self, *arguments: str, check: bool = True, text: str | None = None) -> str:
        done = subprocess.run(
            [self.bin / "kubectl", f"--kubeconfig={self.kubeconfig}", *arguments],
            input=text,
            capture_output=True,
            text=True,
            env=self.environment(HOME=str(self.home)),
            cwd=REPOSITORY,
            timeout=120,
            check=False,
        )
        assert not check or done.returncode == 0, f"kubectl {arguments}: {done.stderr}"
        return done.stdout + ("" if check else done.stderr)

    def apply(self, *objects: dict[str, Any]) -> None:
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("create", "-f", "-", text=json.dumps(listed))

    def get(self, *what: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kubectl("get", *what, "-o", "json"))
        return found

    def events(self, pod: str, reason: str) -> list[str]:
        items = self.get("events", "--field-selector", f"involvedObject.name={pod},reason={reason}")
        return [item["message"] for item in items["items"]]

    def account(self, name: str) -> Path:
        """A configuration with the token of a service account, and nothing else."""
        port = int(self.wire.url.rpartition(":")[2])

        def token() -> str:
            secrets = self.get("secrets", "-n", "reclaimnet-system")["items"]
            for secret in secrets:
                notes = secret["metadata"].get("annotations", {})
                if notes.get("kubernetes.io/service-account.name") == name:
                    return base64.b64decode(secret["data"]["token"]).decode()
            return ""

        path = self.home / f"{name}.conf"
        path.write_text(yaml.safe_dump(self._config(until(token, f"{name} has a token"), port)))
        return path

    def _config(self, token: str, port: int) -> dict[str, Any]:
        server = f"https://127.0.0.1:{port}"
        cluster = {"server": server, "insecure-skip-tls-verify": True}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }

    def _write_files(self) -> None:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        (self.home / "sa.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )
        (self.home / "sa.pub").write_bytes(
            key.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )
        (self.home / "tokens.csv").write_text(f'{ADMIN},admin,admin,"system:masters"\n')
        self.kubeconfig.write_text(yaml.safe_dump(self._config(ADMIN, self.port)))

    def _answers(self) -> bool:
        ended = [p for p in self._processes if p.poll() is not None]
        assert not ended, f"the API server did not start: {self.log('apiserver')[-2000:]}"
        with (
            contextlib.suppress(ReclaimNetError),
            contextlib.closing(Api(kubeconfig=self.kubeconfig)) as api,
        ):
            api.list(NODES)
            return "ok" in self.kubectl("get", "--raw", "/readyz", check=False)
        return False


def end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def answers_http(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def running(home: Path) -> Iterator[Cluster]:
    cluster = Cluster(home)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()
