"""The API server of a Kubernetes cluster: list, watch, write, and say in a sentence what failed."""

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from reclaimnet.errors import BadConfig, Forbidden, NotFound, ReclaimNetError, Unavailable
from reclaimnet.model.pods import GROUP, VERSION

try:
    import httpx2
    import yaml
    from lightkube import ApiError, Client, KubeConfig
    from lightkube.config.client_adapter import verify_cluster
    from lightkube.core.exceptions import ConfigError
    from lightkube.generic_resource import create_global_resource, create_namespaced_resource
    from lightkube.types import PatchType
except ImportError as error:
    raise Unavailable(
        f"Kubernetes needs the package {error.name}, which is not installed: "
        "pip install 'reclaimnet[kube]'"
    ) from error

ANSWER_S: Final = 10.0
WATCH_S: Final = 240
"""The server ends a watch after this long, and we ask again from where it stopped."""
KEEPALIVE_S: Final = 15
KEEPALIVE_TRIES: Final = 3
MAX_EVENT_TEXT: Final = 1024
"""What Kubernetes keeps of an event's message."""

Object = dict[str, Any]

PODS: Final[Any] = create_namespaced_resource("", "v1", "Pod", "pods")
NODES: Final[Any] = create_global_resource("", "v1", "Node", "nodes")
EVENTS: Final[Any] = create_namespaced_resource("", "v1", "Event", "events")
LEASES: Final[Any] = create_namespaced_resource("coordination.k8s.io", "v1", "Lease", "leases")
LINKS: Final[Any] = create_global_resource(GROUP, VERSION, "Link", "links")
RHYTHMS: Final[Any] = create_namespaced_resource(GROUP, VERSION, "Rhythm", "rhythms")


class Conflict(ReclaimNetError):
    """Somebody else has written it first, or it is there already."""


class Gone(ReclaimNetError):
    """What was asked for lies too far back: list again."""


class Api:
    """Every method raises errors of errors.py only; Conflict and Gone among them."""

    def __init__(self, *, kubeconfig: Path | None = None, context: str | None = None) -> None:
        """Where from: the file, else KUBECONFIG, else a pod's service account, else ~/.kube."""
        found, where = _config(kubeconfig)
        try:
            single = found.get(context)
        except (ConfigError, KeyError) as error:
            known = ", ".join(sorted(found.contexts)) or "none"
            wanted = context or found.current_context
            raise BadConfig(
                f"{where} has no usable context {wanted!r}; it has: {known}"
                if wanted
                else f"{where} names no current context; choose one with --context: {known}"
            ) from error
        if single is None or single.user is None:
            raise BadConfig(f"{where}: the context names no user; add one to it")
        self.server = single.cluster.server
        self.namespace = single.namespace
        try:
            self._http = _transport(single)
            self._client: Any = Client(
                config=single,
                timeout=httpx2.Timeout(ANSWER_S),
                trust_env=False,
                transport=self._http,
            )
        except (ConfigError, OSError, ValueError) as error:
            raise BadConfig(f"{where} cannot be used ({error}); mend it") from error

    def close(self) -> None:
        """Lets go of all connections; watches that are under way fail."""
        self._http.close()

    def list(self, kind: Any) -> tuple[list[Object], str]:
        """All objects of a kind in all namespaces, and the version of the list."""
        with self._sentences(kind):
            found = self._client.list(kind, **_everywhere(kind))
            objects = [dict(item) for item in found]
            return objects, found.resourceVersion

    def watch(self, kind: Any, version: str) -> Iterator[tuple[str, Object]]:
        """Changes since the version, until the server ends it."""
        with self._sentences(kind):
            changes = self._client.watch(
                kind,
                **_everywhere(kind),
                resource_version=version,
                server_timeout=WATCH_S,
            )
            for change, item in changes:
                yield change, dict(item)

    def get(self, kind: Any, name: str, *, namespace: str | None = None) -> Object:
        with self._sentences(kind, name):
            return dict(self._client.get(kind, name, **_in(namespace)))

    def create(self, kind: Any, body: Mapping[str, Any], *, namespace: str | None = None) -> Object:
        with self._sentences(kind, str(body["metadata"].get("name", ""))):
            return dict(self._client.create(kind(body), **_in(namespace)))

    def replace(
        self, kind: Any, body: Mapping[str, Any], *, namespace: str | None = None
    ) -> Object:
        """By compare-and-set, if the body carries a version; Conflict if it is an old one."""
        with self._sentences(kind, str(body["metadata"]["name"])):
            return dict(self._client.replace(kind(body), **_in(namespace)))

    def patch(
        self,
        kind: Any,
        name: str,
        changes: Mapping[str, Any],
        *,
        namespace: str | None = None,
        status: bool = False,
    ) -> Object:
        """Merge the changes into it; None removes a key."""
        what = kind.Status if status else kind
        with self._sentences(kind, name):
            return dict(
                self._client.patch(
                    what, name, dict(changes), patch_type=PatchType.MERGE, **_in(namespace)
                )
            )

    def delete(
        self, kind: Any, name: str, *, namespace: str | None = None, grace_s: int | None = None
    ) -> None:
        with self._sentences(kind, name):
            self._client.delete(kind, name, grace_period=grace_s, **_in(namespace))

    @contextmanager
    def _sentences(self, kind: Any, name: str = "") -> Iterator[None]:
        plural = kind._api_info.plural
        try:
            yield
        except ApiError as error:
            text = error.status.message or ""
            raise self._refusal(error.status.code or 0, text, plural, name) from error
        except httpx2.HTTPStatusError as error:
            # Watches, and kinds the server does not know, are refused without a Status.
            raise self._refusal(error.response.status_code, "", plural, name) from error
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            reason = str(error) or type(error).__name__
            raise Unavailable(
                f"the API server {self.server} does not answer ({reason}); "
                "check that it runs and that the address is right"
            ) from error

    def _refusal(self, code: int, reason: str, plural: str, name: str) -> ReclaimNetError:
        text = reason or f"HTTP {code} for {plural}"
        if code == 404:
            return NotFound(f"there is no {name} among the {plural}") if name else _unknown(plural)
        if code == 409:
            return Conflict(text)
        if code == 410:
            return Gone(text)
        if code == 401:
            return Forbidden(f"the API server {self.server} does not know us; renew the token")
        if code == 403:
            return Forbidden(f"{text}; apply deploy/kubernetes, which has the roles we need")
        if 400 <= code < 500 and code != 429:
            return BadConfig(f"the API server refused {name or plural}: {text}")
        return Unavailable(f"the API server {self.server} failed: {text}")


def now_text() -> str:
    """Now, as Kubernetes writes times with fractions."""
    ns = time.time_ns()
    return (
        f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(ns // 10**9))}.{ns % 10**9 // 1000:06d}Z"
    )


def _transport(single: Any) -> Any:
    """With keepalive: a watch whose server vanished without a word must not wait for ever."""
    trust = verify_cluster(single.cluster, single.user, single.abs_file, trust_env=False)
    return httpx2.HTTPTransport(
        verify=trust,
        socket_options=[
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_TRIES),
        ],
    )


def _config(kubeconfig: Path | None) -> tuple["KubeConfig", str]:
    path = kubeconfig
    if path is None and os.environ.get("KUBECONFIG"):
        path = Path(os.environ["KUBECONFIG"])
    if path is None:
        try:
            return KubeConfig.from_service_account(), "the pod's service account"
        except (ConfigError, KeyError):
            path = Path("~/.kube/config").expanduser()
    try:
        return KubeConfig.from_file(path), str(path)
    except ConfigError as error:
        raise NotFound(
            f"no Kubernetes configuration was found at {path}; name one with --kubeconfig FILE "
            "or in KUBECONFIG"
        ) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise BadConfig(f"{path} is not a Kubernetes configuration ({reason})") from error


def _unknown(plural: str) -> NotFound:
    return NotFound(
        f"the cluster does not know our {plural}; run `kubectl apply -k deploy/kubernetes` first"
    )


def _everywhere(kind: Any) -> dict[str, str]:
    return {"namespace": "*"} if kind in (PODS, EVENTS, LEASES, RHYTHMS) else {}


def _in(namespace: str | None) -> dict[str, str]:
    return {} if namespace is None else {"namespace": namespace}
