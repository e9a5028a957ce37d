"""A lease of the cluster, so that of several controllers one acts and the others stand by."""

import logging
import threading
import time
from typing import Any, Final

from reclaimnet.adapters.kube.client import LEASES, Api, Conflict, Object, now_text
from reclaimnet.errors import NotFound, ReclaimNetError

LEASE_S: Final = 15
RENEW_S: Final = 3.0
GIVE_UP_S: Final = 10.0
"""A holder that could not renew for so long stops acting: before others may take it over."""

_log = logging.getLogger("reclaimnet.kube")


class Lease:
    """Taken, renewed and given up by a thread of its own, however busy its holder is."""

    def __init__(self, api: Api, *, namespace: str, name: str, identity: str) -> None:
        self.identity = identity
        self.holder = ""
        """Who holds it, as far as we know."""
        self._api = api
        self._namespace = namespace
        self._name = name
        self._seen: tuple[str, str] | None = None
        self._seen_at = 0.0
        """When it was last seen to be renewed, by our own clock: those of others may differ."""
        self._renewed_at: float | None = None
        self._released = threading.Event()

    def keep(self) -> None:
        """From now on, try to hold it."""
        threading.Thread(target=self._keep, name="lease", daemon=True).start()

    @property
    def held(self) -> bool:
        return self.held_at(time.monotonic())

    def held_at(self, now: float) -> bool:
        renewed = self._renewed_at
        return renewed is not None and now - renewed < GIVE_UP_S

    def _keep(self) -> None:
        while not self._released.is_set():
            try:
                self.look(time.monotonic())
            except ReclaimNetError as error:
                _log.warning("the lease %s: %s", self._name, error)
            self._released.wait(RENEW_S)

    def release(self, now: float | None = None) -> None:
        """Let another one take it at once."""
        self._released.set()
        if not self.held_at(time.monotonic() if now is None else now):
            return
        self._renewed_at = None
        try:
            found = self._api.get(LEASES, self._name, namespace=self._namespace)
            if found["spec"].get("holderIdentity") == self.identity:
                found["spec"] = {**found["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
                self._api.replace(LEASES, found, namespace=self._namespace)
        except ReclaimNetError as error:
            _log.warning("the lease %s was not given back: %s", self._name, error)

    def look(self, now: float) -> None:
        """Take it if it is free or has lapsed, renew it if it is ours."""
        try:
            found = self._api.get(LEASES, self._name, namespace=self._namespace)
        except NotFound:
            self._write(None, now)
            return
        spec: dict[str, Any] = found.get("spec") or {}
        self.holder = spec.get("holderIdentity") or ""
        mark = self.holder, str(spec.get("renewTime"))
        if mark != self._seen:
            self._seen, self._seen_at = mark, now
        lasts = float(spec.get("leaseDurationSeconds") or LEASE_S)
        if self.holder in ("", self.identity) or now - self._seen_at > lasts:
            self._write(found, now)
        else:
            self._renewed_at = None

    def _write(self, found: Object | None, now: float) -> None:
        before = {} if found is None else found.get("spec") or {}
        taken = self.holder != self.identity
        spec = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": LEASE_S,
            "renewTime": now_text(),
            "acquireTime": now_text() if taken else before.get("acquireTime", now_text()),
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + int(taken),
        }
        try:
            if found is None:
                body = {"metadata": {"name": self._name}, "spec": spec}
                self._api.create(LEASES, body, namespace=self._namespace)
            else:
                self._api.replace(LEASES, {**found, "spec": spec}, namespace=self._namespace)
        except Conflict:
            self._renewed_at = None  # another one was faster
            return
        self.holder = self.identity
        self._renewed_at = now
