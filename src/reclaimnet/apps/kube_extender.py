"""`rn kube extender`: tells the stock scheduler on which nodes a pod's bursts meet nobody's."""

import http.server
import logging
import re
import signal
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from reclaimnet.adapters.kube.client import PODS, Api
from reclaimnet.adapters.kube.mirror import Mirror
from reclaimnet.adapters.kube.read import UNREADABLE, pod_of
from reclaimnet.apps.kube_view import Views, mirror_of
from reclaimnet.errors import UsageError
from reclaimnet.model.pods import Pod
from reclaimnet.policy.lodge import Lodge, Lodger, Lodging

MAX_SCORE: Final = 10
"""What an extender may give at most; the scheduler multiplies it by the extender's weight."""
MAX_BODY_BYTES: Final = 16 << 20
IDLE_S: Final = 90.0
"""A connection on which nothing was asked for so long is closed."""
SETTLE_S: Final = 1.0
"""How long a pod waits for those before it to be bound. The scheduler takes one at a time, but
binds behind its own back: without this, two pods could be promised the same gap."""

_log = logging.getLogger("reclaimnet.kube")


class Arguments(msgspec.Struct, rename={"pod": "Pod", "nodes": "Nodes", "names": "NodeNames"}):
    """What the scheduler sends; NodeNames if it was told that we know the nodes, else Nodes."""

    pod: dict[str, Any]
    nodes: dict[str, Any] | None = None
    names: list[str] | None = None

    def node_names(self) -> list[str]:
        if self.names is not None:
            return self.names
        return [item["metadata"]["name"] for item in (self.nodes or {}).get("items") or []]


class Extender:
    """The answers, without the HTTP around them."""

    def __init__(self, mirror: Mirror, lodge: Lodge) -> None:
        self._mirror = mirror
        self._views = Views(mirror)
        self._lodge = lodge
        self._lock = threading.Lock()
        self._approved: dict[str, str] = {}
        """Uid and key of pods that were told where they fit, until they are seen to be bound."""
        self.registry = CollectorRegistry()
        self._asked = Counter(
            "reclaimnet_kube_filtered_pods",
            "Pods that the scheduler asked about, by whether they have a rhythm",
            ["rhythm"],
            registry=self.registry,
        )
        self._refused = Counter(
            "reclaimnet_kube_refused_nodes", "Nodes that were full for one", registry=self.registry
        )
        self._took = Histogram(
            "reclaimnet_kube_filter_seconds", "How long an answer took", registry=self.registry
        )

    def filter(self, asked: Arguments) -> dict[str, Any]:
        with self._took.time():
            lodgings = self._lodgings(asked, settle=True)
        kept = [lodging.node for lodging in lodgings if not lodging.refused]
        failed = {
            lodging.node: f"reclaimnet: {lodging.refused}"
            for lodging in lodgings
            if lodging.refused
        }
        self._refused.inc(len(failed))
        answer: dict[str, Any] = {"NodeNames": kept, "FailedNodes": failed, "Error": ""}
        if asked.names is None:
            items = (asked.nodes or {}).get("items") or []
            chosen = [item for item in items if item["metadata"]["name"] in set(kept)]
            answer["Nodes"] = {"metadata": {}, "items": chosen}
        return answer

    def prioritize(self, asked: Arguments) -> list[dict[str, Any]]:
        lodgings = self._lodgings(asked, settle=False)
        return [{"Host": lodging.node, "Score": self._score(lodging)} for lodging in lodgings]

    def _score(self, lodging: Lodging) -> int:
        room = self._lodge.max_slowdown - 1.0
        share = (
            1.0 - (lodging.slowdown - 1.0) / room if room > 0 else float(lodging.slowdown <= 1.0)
        )
        return round(MAX_SCORE * min(1.0, max(0.0, share)))

    def _lodgings(self, asked: Arguments, *, settle: bool) -> tuple[Lodging, ...]:
        names = asked.node_names()
        pod = pod_of(asked.pod)
        with self._lock:
            lodger, _ = self._views.now().lodger(pod, node="")
            if settle:
                self._asked.labels("no" if lodger is None else "yes").inc()
            if lodger is None:
                # Without a rhythm every node is as good as any other; what is wrong with one that
                # cannot be read, the controller tells the pod.
                return tuple(Lodging(node=name, slowdown=1.0) for name in names)
            if settle:
                self._settle(pod)
            lodgings = self._ask(lodger, pod, names)
            if settle and any(not lodging.refused for lodging in lodgings):
                self._approved[pod.uid] = pod.key
            return lodgings

    def _ask(self, lodger: Lodger, pod: Pod, names: Iterable[str]) -> tuple[Lodging, ...]:
        view = self._views.now()
        present = [other for uid, other in view.lodgers.items() if uid != pod.uid]
        return self._lodge(lodger, names, present=present, reach=view.reach, links=view.capacities)

    def _settle(self, pod: Pod) -> None:
        """Wait until those that were approved before are on a node, or will not be."""
        self._approved.pop(pod.uid, None)
        if not self._mirror.await_that(self._settled, SETTLE_S):
            _log.warning("not bound within %g s: %s", SETTLE_S, ", ".join(self._approved.values()))
        self._approved.clear()

    def _settled(self) -> bool:
        for uid, key in self._approved.items():
            known: Pod | None = self._mirror.get(PODS, key)
            waits = known is not None and known.uid == uid and not known.over
            if known is not None and waits and known.node is None and not known.unschedulable:
                return False
        return True


class _Door(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    disable_nagle_algorithm = True
    extender: Extender

    def do_GET(self) -> None:
        match self.path:
            case "/healthz":
                self._answer(200, b"ok\n")
            case "/metrics":
                self._answer(200, generate_latest(self.extender.registry))
            case _:
                self._answer(404, b"there are /healthz and /metrics\n")

    def do_POST(self) -> None:
        verbs = {"/filter": self.extender.filter, "/prioritize": self.extender.prioritize}
        verb = verbs.get(self.path)
        length = self.headers.get("Content-Length", "")
        # Longer numbers Python refuses to read.
        if not re.fullmatch(r"[0-9]{1,12}", length) or int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            self._answer(413, b"a body of a known and bounded length is needed\n")
            return
        body = self.rfile.read(int(length))
        if verb is None:
            self._answer(404, b"there are /filter and /prioritize\n")
            return
        try:
            answer = verb(msgspec.json.decode(body, type=Arguments))
        except (msgspec.DecodeError, RecursionError, *UNREADABLE) as error:
            self._answer(400, f"not what a scheduler asks: {error}\n".encode())
            return
        self._answer(200, msgspec.json.encode(answer), kind="application/json")

    def _answer(self, status: int, body: bytes, *, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True


def serve(extender: Extender, *, host: str, port: int) -> http.server.ThreadingHTTPServer:
    """Bound, not yet answering: call serve_forever."""
    door = type("Door", (_Door,), {"extender": extender})
    try:
        if ":" in host:
            _Server.address_family = socket.AF_INET6
        return _Server((host, port), door)
    except OSError as error:
        raise UsageError(
            f"{host}:{port} cannot be listened on ({error.strerror or error}); choose another "
            "address with --listen"
        ) from error


def run(
    *, kubeconfig: Path | None, context: str | None, listen: tuple[str, int], max_slowdown: float
) -> int:
    """Behind `rn kube extender`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    mirror = mirror_of(Api(kubeconfig=kubeconfig, context=context))
    mirror.start()
    extender = Extender(mirror, Lodge(max_slowdown=max_slowdown))
    host, port = listen
    server = serve(extender, host=host, port=port)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    answering = threading.Thread(target=server.serve_forever, daemon=True)
    begun = time.monotonic()
    answering.start()
    _log.info("answering the scheduler at http://%s:%d", host, server.server_address[1])
    stop.wait()
    server.shutdown()
    server.server_close()
    _log.info("ended after %.0f s", time.monotonic() - begun)
    return 0
