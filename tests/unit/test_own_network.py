"""The network of a testbed of one's own is one that nobody on this machine has an address in."""

from ipaddress import IPv4Address, IPv4Network

import pytest

from reclaimnet.adapters.linux import testbed as adapter
from reclaimnet.apps.testbed import own_network
from reclaimnet.errors import Unavailable


def taken(monkeypatch: pytest.MonkeyPatch, *networks: str) -> None:
    addresses = [IPv4Address("127.0.0.1"), *(IPv4Network(network)[1] for network in networks)]
    monkeypatch.setattr(adapter, "local_addresses", lambda: addresses)


def test_a_network_that_is_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    for _ in range(150):
        taken(monkeypatch, *chosen)
        chosen.append(own_network())
    assert len(chosen) == len(set(chosen))
    assert str(adapter.DEFAULT_NETWORK) not in chosen
    taken(monkeypatch, *chosen)
    with pytest.raises(Unavailable):
        own_network()


def test_the_same_process_has_the_same_network(monkeypatch: pytest.MonkeyPatch) -> None:
    taken(monkeypatch)
    assert own_network() == own_network()
