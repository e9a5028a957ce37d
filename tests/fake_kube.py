"""An API server in memory: objects with versions, compare-and-set, and watches."""

import copy
import queue
from collections.abc import Iterator, Mapping
from typing import Any

from reclaimnet.adapters.kube.client import Conflict
from reclaimnet.errors import NotFound


class FakeApi:
    def __init__(self) -> None:
        self.objects: dict[Any, dict[str, dict[str, Any]]] = {}
        self.writes: list[tuple[str, str]] = []
        self._watches: list[tuple[Any, queue.Queue[tuple[str, dict[str, Any]]]]] = []
        self._version = 0

    # --- what Api offers -----------------------------------------------------------------------

    def list(self, kind: Any) -> tuple[list[dict[str, Any]], str]:
        found = self.objects.setdefault(kind, {})
        return [copy.deepcopy(found[key]) for key in sorted(found)], str(self._version)

    def watch(self, kind: Any, version: str) -> Iterator[tuple[str, dict[str, Any]]]:
        news: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        since = int(version)
        for item in self.objects.setdefault(kind, {}).values():
            if int(item["metadata"]["resourceVersion"]) > since:
                news.put(("MODIFIED", copy.deepcopy(item)))
        self._watches.append((kind, news))
        while True:
            yield news.get()

    def get(self, kind: Any, name: str, *, namespace: str | None = None) -> dict[str, Any]:
        try:
            return copy.deepcopy(self.objects.setdefault(kind, {})[_key(namespace, name)])
        except KeyError as error:
            raise NotFound(f"there is no {name}") from error

    def create(
        self, kind: Any, body: Mapping[str, Any], *, namespace: str | None = None
    ) -> dict[str, Any]:
        key = _key(namespace, body["metadata"]["name"])
        if key in self.objects.setdefault(kind, {}):
            raise Conflict(f"{key} is there already")
        item = copy.deepcopy(dict(body))
        if namespace is not None:
            item["metadata"]["namespace"] = namespace
        item["metadata"].setdefault("uid", f"uid-{key}")
        return self._store(kind, key, item, "ADDED")

    def replace(
        self, kind: Any, body: Mapping[str, Any], *, namespace: str | None = None
    ) -> dict[str, Any]:
        key = _key(namespace, body["metadata"]["name"])
        known = self.objects[kind][key]["metadata"]["resourceVersion"]
        if body["metadata"].get("resourceVersion", known) != known:
            raise Conflict(f"{key} was written by somebody else")
        return self._store(kind, key, copy.deepcopy(dict(body)), "MODIFIED")

    def patch(
        self, kind: Any, name: str, changes: Mapping[str, Any], *, namespace: str | None = None,
        status: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        key = _key(namespace, name)
        if key not in self.objects.setdefault(kind, {}):
            raise NotFound(f"there is no {name}")
        return self._store(kind, key, _merged(self.objects[kind][key], changes), "MODIFIED")

    # --- what tests do -------------------------------------------------------------------------

    def remove(self, kind: Any, name: str, *, namespace: str | None = None) -> None:
        item = self.objects[kind].pop(_key(namespace, name))
        self._tell(kind, "DELETED", item)

    def _store(self, kind: Any, key: str, item: dict[str, Any], change: str) -> dict[str, Any]:
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        self.objects[kind][key] = item
        self.writes.append((kind.__name__, key))
        self._tell(kind, change, item)
        return copy.deepcopy(item)

    def _tell(self, kind: Any, change: str, item: dict[str, Any]) -> None:
        for watched, news in self._watches:
            if watched is kind:
                news.put((change, copy.deepcopy(item)))


def _key(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}/{name}"


def _merged(value: Any, changes: Any) -> Any:
    """A merge patch, as RFC 7386 has it."""
    if not isinstance(changes, Mapping):
        return copy.deepcopy(changes)
    result = dict(value) if isinstance(value, Mapping) else {}
    for name, change in changes.items():
        if change is None:
            result.pop(name, None)
        else:
            result[name] = _merged(result.get(name), change)
    return result
