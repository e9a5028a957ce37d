"""A mirror of the parts of a cluster that we look at: listed once, then kept by watching."""

import logging
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from reclaimnet.adapters.kube.client import Api, Gone, Object
from reclaimnet.adapters.kube.read import UNREADABLE
from reclaimnet.errors import ReclaimNetError

BACK_OFF_S: Final = 0.2
MAX_BACK_OFF_S: Final = 30.0
"""How long a watch that keeps failing waits before it tries again."""

Read = Callable[[Object], Any]
_log = logging.getLogger("reclaimnet.kube")


class Mirror:
    """What the cluster said last. Reading never waits for the API server."""

    def __init__(self, api: Api, kinds: Mapping[Any, Read]) -> None:
        self.version = 0
        """Raised with every change."""
        self._api = api
        self._kinds = dict(kinds)
        self._found: dict[Any, dict[str, Any]] = {kind: {} for kind in kinds}
        self._wrong: dict[Any, dict[str, tuple[Object, str]]] = {kind: {} for kind in kinds}
        self._changed = threading.Condition()
        self._closed = threading.Event()

    def start(self) -> None:
        """List everything, raising what is wrong; from then on failures are retried for ever."""
        versions = {kind: self._list(kind) for kind in self._kinds}
        for kind, version in versions.items():
            threading.Thread(
                target=self._keep, args=(kind, version), name=_plural(kind), daemon=True
            ).start()

    def close(self) -> None:
        """Watch no more; what runs into the end of a connection after this is not said."""
        self._closed.set()

    def all(self, kind: Any) -> list[Any]:
        """All objects of the kind that could be read, by name."""
        with self._changed:
            found = self._found[kind]
            return [found[key] for key in sorted(found)]

    def get(self, kind: Any, key: str) -> Any | None:
        with self._changed:
            return self._found[kind].get(key)

    def unreadable(self, kind: Any) -> list[tuple[Object, str]]:
        """Objects that could not be read, and why."""
        with self._changed:
            wrong = self._wrong[kind]
            return [wrong[key] for key in sorted(wrong)]

    def await_change(self, since: int, timeout_s: float) -> int:
        """The version once it is newer than `since`, or after so long."""
        with self._changed:
            self._changed.wait_for(lambda: self.version != since, timeout_s)
            return self.version

    def await_that(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Whether the condition, which looks at this mirror, came true in time."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)

    # --- keeping -----------------------------------------------------------------------------

    def _keep(self, kind: Any, version: str) -> None:
        failures = 0
        stale = False
        while not self._closed.is_set():
            try:
                if stale:
                    version = self._list(kind)
                    stale = False
                for change, item in self._api.watch(kind, version):
                    failures = 0
                    self._apply(kind, change, item)
            except Gone:
                pass
            except ReclaimNetError as error:
                failures += 1
                self._back_off(failures, error)
            stale = True

    def _back_off(self, failures: int, error: ReclaimNetError) -> None:
        if not self._closed.is_set():
            _log.warning("%s", error)
        most = min(MAX_BACK_OFF_S, BACK_OFF_S * 2 ** min(failures, 16))
        # So that all watches of all controllers do not come back at the same moment.
        self._closed.wait(random.uniform(most / 2, most))

    def _list(self, kind: Any) -> str:
        items, version = self._api.list(kind)
        with self._changed:
            self._found[kind].clear()
            self._wrong[kind].clear()
            self._take(kind, items)
            self._note()
        return version

    def _apply(self, kind: Any, change: str, item: Object) -> None:
        with self._changed:
            if change == "DELETED":
                self._found[kind].pop(_key(item), None)
                self._wrong[kind].pop(_key(item), None)
            elif change in ("ADDED", "MODIFIED"):
                before = self._found[kind].get(_key(item))
                self._take(kind, [item])
                if before is not None and before == self._found[kind].get(_key(item)):
                    return  # only what we do not look at has changed, such as a heartbeat
            self._note()

    def _take(self, kind: Any, items: Iterable[Object]) -> None:
        for item in items:
            key = _key(item)
            try:
                self._found[kind][key] = self._kinds[kind](item)
                self._wrong[kind].pop(key, None)
            except UNREADABLE as error:
                self._found[kind].pop(key, None)
                self._wrong[kind][key] = item, str(error) or type(error).__name__

    def _note(self) -> None:
        self.version += 1
        self._changed.notify_all()


def _key(item: Object) -> str:
    meta = item["metadata"]
    return f"{meta['namespace']}/{meta['name']}" if meta.get("namespace") else str(meta["name"])


def _plural(kind: Any) -> str:
    return str(kind._api_info.plural)
