"""The lease: one holder at a time, taken over when it lapses or is given back."""

from tests.fake_kube import FakeApi

from reclaimnet.adapters.kube.client import LEASES
from reclaimnet.adapters.kube.lease import GIVE_UP_S, LEASE_S, RENEW_S, Lease


def lease(api: FakeApi, identity: str) -> Lease:
    return Lease(api, namespace="ns", name="l", identity=identity)


def holder(api: FakeApi) -> str:
    return str(api.get(LEASES, "l", namespace="ns")["spec"]["holderIdentity"])


def test_the_first_takes_it_and_the_second_waits_until_it_lapses() -> None:
    api = FakeApi()
    first, second = lease(api, "first"), lease(api, "second")
    first.look(0.0)
    assert first.held_at(1.0)
    for now in (1.0, 4.0, 15.9):
        second.look(now)
        assert not second.held_at(now)
    assert second.holder == "first"
    second.look(1.0 + LEASE_S + 0.1)
    assert second.held_at(1.0 + LEASE_S + 0.1)
    assert holder(api) == "second"
    assert api.get(LEASES, "l", namespace="ns")["spec"]["leaseTransitions"] == 2


def test_renewing_keeps_it_however_long() -> None:
    api = FakeApi()
    first, second = lease(api, "first"), lease(api, "second")
    for i in range(20):
        first.look(i * RENEW_S)
        second.look(i * RENEW_S + 1)
        assert first.held_at(i * RENEW_S + 1)
    assert holder(api) == "first"


def test_who_could_not_renew_stops_before_another_may_begin() -> None:
    assert GIVE_UP_S < LEASE_S
    first = lease(FakeApi(), "first")
    first.look(0.0)
    assert not first.held_at(GIVE_UP_S + 0.1)


def test_of_two_that_see_it_lapse_only_one_takes_it() -> None:
    api = FakeApi()
    lease(api, "gone").look(0.0)
    first, second = lease(api, "first"), lease(api, "second")
    first.look(0.0)
    second.look(0.0)
    stale = api.get(LEASES, "l", namespace="ns")
    later = LEASE_S + 1.0
    first.look(later)
    api.get = lambda *_, **__: stale  # type: ignore[method-assign] # what it read before the other wrote
    second.look(later)
    assert first.held_at(later)
    assert not second.held_at(later)


def test_given_back_it_is_taken_at_once() -> None:
    api = FakeApi()
    first, second = lease(api, "first"), lease(api, "second")
    first.look(0.0)
    second.look(0.5)
    first.release(1.0)
    assert not first.held_at(1.0)
    second.look(1.5)
    assert second.held_at(1.5)
