"""`rn kube controller`: keeps rhythms and links of a cluster up to date, and turns what Kubernetes
does to lent pods into notices.

It looks at the whole each time something has changed, and writes only what is not so already: what
it missed, or did twice, does no harm.
"""

import contextlib
import hashlib
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from reclaimnet.adapters.kube.client import (
    EVENTS,
    LINKS,
    MAX_EVENT_TEXT,
    PODS,
    RHYTHMS,
    Api,
    Conflict,
    now_text,
)
from reclaimnet.adapters.kube.lease import Lease
from reclaimnet.adapters.kube.mirror import MAX_BACK_OFF_S, Mirror
from reclaimnet.adapters.kube.read import time_of
from reclaimnet.apps.client import Gateway
from reclaimnet.apps.config import Config
from reclaimnet.apps.kube_view import View, Views, mirror_of
from reclaimnet.errors import NotFound, ReclaimNetError, Unavailable, UsageError
from reclaimnet.model.asking import LendRequest, ReclaimRequest, Reply, Request, WithdrawRequest
from reclaimnet.model.market import Card, JobId
from reclaimnet.model.pods import NOTICE, ROTATION, SAID, Pod
from reclaimnet.model.rhythm import RotationPlan, Round
from reclaimnet.model.units import SECOND, show_duration
from reclaimnet.policy.fit import slowdown
from reclaimnet.policy.lodge import MAX_SLOWDOWN, together
from reclaimnet.policy.rotate import rotate

SETTLE_S: Final = 0.1
"""Changes come in groups: so long is waited for the rest of one."""
RESYNC_S: Final = 60.0
"""Everything is looked at again after so long even if nothing was heard."""
LOOK_AGAIN_S: Final = 1.0
"""How soon, while an agent in a lent pod has not yet joined or answered."""
LAST_S: Final = 5
"""Guests leave so much before Kubernetes ends their pod, but have half of its grace at least."""
MAX_LISTED: Final = 100
"""Jobs that a status names, so that no object outgrows what the API server stores."""
MAX_TOLD: Final = 10_000
LEASE_NAME: Final = "reclaimnet-controller"
COMPONENT: Final = "reclaimnet-controller"

_log = logging.getLogger("reclaimnet.kube")


class Controller:
    def __init__(self, api: Api, mirror: Mirror, gateway: Gateway | None) -> None:
        self._api = api
        self._views = Views(mirror)
        self._gateway = gateway
        self._plan = RotationPlan(rounds=())
        self._anchors: dict[JobId, tuple[int, int]] = {}
        """When an iteration of each job was to begin, in nanoseconds since 1970, and its period."""
        self._expected: dict[JobId, float] = {}
        """The slowdown of the round that each job is in."""
        self._told: dict[str, None] = {}
        self._not_before: dict[tuple[str, int], float] = {}
        """When each pod whose agent has refused to lend may be asked the same again."""
        self._failed: list[str] = []

    def reconcile(self) -> float:
        """Make it so; returns after how many seconds to look again at the latest. Raises
        Unavailable if something could not be written."""
        self._failed = []
        view = self._views.now()
        self._rotate(view, time.time_ns())
        self._write_links(view)
        self._write_rhythms(view)
        self._write_pods(view)
        waits = self._write_loans(view, time.time_ns())
        if self._failed:
            raise Unavailable("; ".join(sorted(set(self._failed))[:3]))
        return LOOK_AGAIN_S if waits else RESYNC_S

    # --- who talks when ----------------------------------------------------------------------

    def _rotate(self, view: View, now: int) -> None:
        """Rounds in which nothing has changed stay; in others jobs are moved little."""
        for pod in view.pods:
            if pod.uid in view.lodgers and pod.job not in self._anchors and pod.rotation:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    known = json.loads(pod.rotation)
                    self._anchors[pod.job] = int(known["anchor"]), int(known["period"])
        rhythms = together(view.lodgers.values(), view.reach)
        links = view.capacities
        plan = rotate(rhythms, links, previous=self._plan)
        kept = {one.rhythms for one in self._plan.rounds}
        fresh = [one for one in plan.rounds if one.rhythms not in kept]
        moved = {rhythm.job for one in fresh for rhythm in one.rhythms}
        current = {
            job: (anchor - now) % period
            for job, (anchor, period) in self._anchors.items()
            if job in moved
        }
        if current:
            plan = rotate(
                rhythms, links, previous=self._plan, current=current, running=sorted(current)
            )
            fresh = [one for one in plan.rounds if one.rhythms not in kept]
        for one in fresh:
            for rhythm in one.rhythms:
                self._anchors.pop(rhythm.job, None)
            for held in one.rotations:
                self._anchors[held.job] = now + held.shift, held.period
        alive = {rhythm.job for rhythm in rhythms}
        self._anchors = {job: at for job, at in self._anchors.items() if job in alive}
        self._plan = plan
        self._expected = {}
        for one in plan.rounds:
            expected = slowdown(one, links)
            self._expected |= {rhythm.job: expected for rhythm in one.rhythms}

    def _write_links(self, view: View) -> None:
        for shared in view.links:
            one = self._round_on(shared.link.id)
            fits = {} if one is None else {fit.link: fit for fit in one.fits}
            here = fits.get(shared.link.id)
            jobs = [] if one is None else [r.job for r in one.rhythms if shared.link.id in r.links]
            expected = 1.0 if one is None else self._expected[one.rhythms[0].job]
            full = expected > MAX_SLOWDOWN
            status = {
                "jobs": sorted(jobs)[:MAX_LISTED],
                "usePercent": 0 if here is None else round(here.use * 100),
                "score": "1.000" if here is None else f"{here.score:.3f}",
                "expectedSlowdown": f"{expected:.3f}",
                "round": "free" if one is None or not one.rotations else show_duration(one.length),
                "observedGeneration": shared.generation,
            }
            why = "; ".join(one.decision.reasons) if one is not None else "no rhythm is on it"
            self._write_status(
                LINKS,
                shared.link.id,
                None,
                shared.status,
                status,
                _condition("Compatible", not full, "Overfull" if full else "BurstsFit", why),
            )

        for item, wrong in view.wrong_links:
            meta = item["metadata"]
            self._write_status(
                LINKS,
                meta["name"],
                None,
                item.get("status") or {},
                {"jobs": [], "observedGeneration": int(meta.get("generation") or 0)},
                _condition("Compatible", False, "Unreadable", wrong),
            )

    def _write_rhythms(self, view: View) -> None:
        users: dict[str, list[Pod]] = {}
        for pod in view.pods:
            if pod.rhythm and not pod.over:
                users.setdefault(f"{pod.namespace}/{pod.rhythm}", []).append(pod)
        for named in view.tunes.values():
            pods = users.get(named.key, [])
            jobs = sorted({pod.job for pod in pods if pod.uid in view.lodgers})
            worst = max((self._expected.get(job, 1.0) for job in jobs), default=1.0)
            if named.tune is None:
                condition = _condition("Fits", False, "Unreadable", named.wrong)
            elif worst > MAX_SLOWDOWN:
                condition = _condition(
                    "Fits", False, "Overfull", f"expected slowdown {worst:.2f} on its links"
                )
            else:
                condition = _condition("Fits", True, "BurstsFit", f"{len(jobs)} jobs keep to it")
            status = {
                "pods": len(pods),
                "jobs": len(jobs),
                "expectedSlowdown": f"{worst:.3f}",
                "observedGeneration": named.generation,
            }
            self._write_status(
                RHYTHMS, named.name, named.namespace, named.status, status, condition
            )

    def _write_pods(self, view: View) -> None:
        """The rotation of each pod, for whoever runs it to keep to, and why it is so."""
        for pod in view.pods:
            if pod.uid in view.wrong:
                self._tell(pod, "RhythmUnreadable", view.wrong[pod.uid], warns=True)
            if pod.uid not in view.lodgers or pod.leaves_at is not None:
                continue
            one = self._plan.round_of(pod.job)
            held = None if one is None else one.rotation(pod.job)
            text = ""
            if held is not None and pod.job in self._anchors:
                anchor, period = self._anchors[pod.job]
                text = json.dumps({"anchor": anchor, "period": period})
            if text != pod.rotation:
                self._annotate(pod, {ROTATION: text or None})
            if one is not None:
                links = ", ".join(fit.link for fit in one.fits)
                expected = self._expected[pod.job]
                if expected > MAX_SLOWDOWN:
                    said = f"{len(one.rhythms)} jobs on {links}: expected slowdown {expected:.2f}"
                    self._tell(pod, "RhythmConflict", said, warns=True)
                else:
                    said = f"bursts of {len(one.rhythms)} jobs lie side by side on {links}"
                    self._tell(pod, "RhythmFits", said)

    def _round_on(self, link: str) -> Round | None:
        return next(
            (one for one in self._plan.rounds if any(fit.link == link for fit in one.fits)), None
        )

    # --- pods that are lent ------------------------------------------------------------------

    def _write_loans(self, view: View, now: int) -> bool:
        """Whether something is still to come that only the campus can tell."""
        lent = [
            pod
            for pod in view.pods
            if pod.lends is not None and pod.phase == "Running" and pod.node is not None
        ]
        known = {(pod.uid, pod.said) for pod in lent}
        self._not_before = {key: at for key, at in self._not_before.items() if key in known}
        if not lent:
            return False
        try:
            cards = self._cards()
        except ReclaimNetError as error:
            for pod in lent:
                self._tell(pod, "CampusSilent", str(error), warns=True)
            self._failed.append(str(error))
            return True
        waits = False
        for pod in lent:
            card = cards.get(pod.name)
            if card is None:
                waits = waits or pod.leaves_at is None
                continue
            if card.address.host != pod.address:
                # Anybody may call a pod like somebody else's node, but not have its address.
                said = f"the agent called {pod.name} is at {card.address.host}, which is not here"
                self._tell(pod, "LoanFailed", said, warns=True)
                continue
            try:
                waits = self._write_loan(view, pod, card, now) or waits
            except ReclaimNetError as error:
                self._tell(pod, "LoanFailed", str(error), warns=True)
                self._failed.append(str(error))
        return waits

    def _write_loan(self, view: View, pod: Pod, card: Card, now: int) -> bool:
        due = _due(view, pod, now)
        if due is not None:
            deadline, why = due
            given = _deadline(pod.notice)
            if (given is None or deadline < given - SECOND) and card.gpus:
                self._give_notice(pod, card, deadline, why, now)
            return False
        if pod.notice:
            # If all guests have left already, there is nothing to withdraw: it is lent anew.
            reply = self._ask(pod, WithdrawRequest(as_of=pod.said)) if card.leaving else None
            self._annotate(pod, {NOTICE: None})
            if reply is None or reply.ok:
                said = "it may be lent on" if reply is None else reply.text
                self._tell(pod, "NoticeWithdrawn", said)
            else:
                self._tell(pod, "NotWithdrawn", reply.text)
            return True
        if pod.lends and not card.gpus and card.opens_at is None:
            return self._lend(pod)
        return False

    def _lend(self, pod: Pod) -> bool:
        """Unless its owner has spoken since we did: who took it back lends it again. Whether there
        is more to come."""
        if time.monotonic() < self._not_before.get((pod.uid, pod.said), 0.0):
            return False
        notice = max(pod.grace - LAST_S * SECOND, pod.grace // 2)
        reply = self._ask(pod, LendRequest(notice=notice, as_of=pod.said))
        if reply.ok:
            self._tell(pod, "Lent", reply.text)
        else:
            self._not_before[pod.uid, pod.said] = time.monotonic() + RESYNC_S
            self._tell(pod, "LoanFailed", reply.text, warns=True)
        return reply.ok

    def _give_notice(self, pod: Pod, card: Card, deadline: int, why: str, now: int) -> None:
        grace = max(0, deadline - now)
        reply = self._ask(pod, ReclaimRequest(grace=grace, reason=why))
        if not reply.ok:
            raise Unavailable(reply.text)
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(deadline // SECOND))
        # Where others were told to leave already, the owner's word stands behind ours.
        ours = bool(pod.notice) or not card.leaving
        said = str(reply.said_at) if ours else None
        self._annotate(pod, {NOTICE: f"{at} {why}", SAID: said})
        self._tell(pod, "NoticeGiven", f"{why}: guests have {show_duration(grace)} to leave")

    def _cards(self) -> dict[str, Card]:
        if self._gateway is None:
            raise Unavailable(
                "pods are to be lent, but no campus is known; set RECLAIMNET_GATEWAY__URL"
            )
        return {str(node.card.node): node.card for node in self._gateway.nodes()}

    def _ask(self, pod: Pod, request: Request) -> Reply:
        assert self._gateway is not None, "only an agent with a card is asked"
        try:
            return self._gateway.ask(pod.name, request)
        except UsageError as refusal:
            return Reply(ok=False, text=str(refusal))

    # --- writing -----------------------------------------------------------------------------

    def _write_status(
        self,
        kind: Any,
        name: str,
        namespace: str | None,
        found: dict[str, Any],
        status: dict[str, Any],
        condition: dict[str, Any],
    ) -> None:
        known: list[dict[str, Any]] = found.get("conditions") or []
        before = next((one for one in known if one.get("type") == condition["type"]), {})
        generation = {"observedGeneration": status["observedGeneration"]}
        condition = {**condition, **generation, "lastTransitionTime": now_text()[:19] + "Z"}
        if before.get("status") == condition["status"] and "lastTransitionTime" in before:
            condition["lastTransitionTime"] = before["lastTransitionTime"]
        wanted = {**status, "conditions": [condition]}
        if wanted == {key: found.get(key) for key in wanted}:
            return
        with self._noting():
            self._api.patch(kind, name, {"status": wanted}, namespace=namespace, status=True)

    def _annotate(self, pod: Pod, notes: dict[str, str | None]) -> None:
        with self._noting():
            changes = {"metadata": {"uid": pod.uid, "annotations": notes}}
            self._api.patch(PODS, pod.name, changes, namespace=pod.namespace)

    def _tell(self, pod: Pod, reason: str, text: str, *, warns: bool = False) -> None:
        """An event on the pod, once: its name is made of what it says, so that not even another
        controller says it twice."""
        sign = hashlib.sha256(f"{pod.uid} {reason} {text}".encode()).hexdigest()[:16]
        if sign in self._told:
            return
        now = now_text()
        body = {
            "metadata": {"name": f"{pod.name[:200]}.{sign}", "namespace": pod.namespace},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": pod.name,
                "namespace": pod.namespace,
                "uid": pod.uid,
            },
            "reason": reason,
            "message": text[:MAX_EVENT_TEXT],
            "type": "Warning" if warns else "Normal",
            "source": {"component": COMPONENT},
            "firstTimestamp": now[:19] + "Z",
            "lastTimestamp": now[:19] + "Z",
            "count": 1,
        }
        with self._noting():
            with contextlib.suppress(Conflict):
                self._api.create(EVENTS, body, namespace=pod.namespace)
            self._told[sign] = None
            while len(self._told) > MAX_TOLD:
                self._told.pop(next(iter(self._told)))

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """One object that cannot be written must not keep the others from being."""
        try:
            yield
        except (NotFound, Conflict):
            pass  # it is gone, or another one of its name is there: the next look sees that
        except ReclaimNetError as error:
            self._failed.append(str(error))


def _due(view: View, pod: Pod, now: int) -> tuple[int, str] | None:
    """Until when guests have to leave a lent pod, and why; None if they may stay.

    Draining a node is cordoning it and evicting its pods: the first of the two is the notice.
    """
    node = view.nodes.get(pod.node or "")
    if pod.leaves_at is not None:
        early = min(LAST_S * SECOND, pod.grace // 2)
        return pod.leaves_at - early, f"pod {pod.name} is evicted or deleted"
    given = _deadline(pod.notice)
    if node is not None and node.cordoned:
        lasts = max(pod.grace - LAST_S * SECOND, pod.grace // 2)
        return given or now + lasts, f"node {node.name} is cordoned"
    if pod.lends is False:
        return given or now + pod.grace, f"pod {pod.name} is not lent any more"
    return None


def _deadline(notice: str) -> int | None:
    if not notice:
        return None
    try:
        return time_of(notice.partition(" ")[0])
    except ValueError:
        return None


def _condition(kind: str, holds: bool, reason: str, message: str) -> dict[str, Any]:
    status = "True" if holds else "False"
    return {"type": kind, "status": status, "reason": reason, "message": message[:MAX_EVENT_TEXT]}


# --- living ----------------------------------------------------------------------------------


def run(
    *,
    config: Config,
    kubeconfig: Path | None,
    context: str | None,
    namespace: str,
    identity: str | None,
) -> int:
    """Behind `rn kube controller`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    api = Api(kubeconfig=kubeconfig, context=context)
    mirror = mirror_of(api)
    mirror.start()
    gateway = Gateway(config) if config.gateway_url else None
    own = identity or f"{socket.gethostname()}-{os.getpid()}"
    lease = Lease(api, namespace=namespace, name=LEASE_NAME, identity=own)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    lease.keep()
    try:
        _live(Controller(api, mirror, gateway), mirror, lease, stop)
    finally:
        lease.release()
    return 0


def _live(controller: Controller, mirror: Mirror, lease: Lease, stop: threading.Event) -> None:
    seen, failures, leads = -1, 0, False
    look_at = time.monotonic()
    while not stop.is_set():
        if lease.held != leads:
            leads = lease.held
            _log.info("%s", "we act now" if leads else f"standing by: {lease.holder} acts")
            look_at = time.monotonic()
        if not leads:
            stop.wait(LOOK_AGAIN_S)
            continue
        mirror.await_change(seen, min(LOOK_AGAIN_S, look_at - time.monotonic()))
        if mirror.version == seen and time.monotonic() < look_at:
            continue
        # After a failure news is still acted on, since it may be an eviction, but not as often.
        if stop.wait(LOOK_AGAIN_S if failures else SETTLE_S):
            continue
        seen = mirror.version
        try:
            look_at = time.monotonic() + controller.reconcile()
            failures = 0
        except ReclaimNetError as error:
            failures += 1
            _log.warning("%s", error)
            pause = min(MAX_BACK_OFF_S, LOOK_AGAIN_S * 2 ** min(failures - 1, 8))
            look_at = time.monotonic() + pause
