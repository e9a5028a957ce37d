"""The extender's answers to a scheduler, over HTTP and without it."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from tests.fake_kube import FakeApi

from reclaimnet.adapters.kube.client import LINKS, NODES, PODS, RHYTHMS
from reclaimnet.adapters.kube.mirror import Mirror
from reclaimnet.apps import kube_extender
from reclaimnet.apps.kube_extender import Arguments, Extender, serve
from reclaimnet.apps.kube_view import mirror_of
from reclaimnet.errors import UsageError
from reclaimnet.policy.lodge import lodge

HEAVY = "300ms: 180ms@1G"


@pytest.fixture
def api() -> FakeApi:
    api = FakeApi()
    for rack in ("a", "b"):
        for number in (1, 2):
            api.create(NODES, {"metadata": {"name": f"{rack}{number}", "labels": {"rack": rack}}})
        selector = {"matchLabels": {"rack": rack}}
        api.create(
            LINKS, {"metadata": {"name": rack}, "spec": {"rate": "1G", "nodeSelector": selector}}
        )
    return api


@pytest.fixture
def mirror(api: FakeApi) -> Mirror:
    mirror = mirror_of(api)
    mirror.start()
    return mirror


@pytest.fixture
def extender(mirror: Mirror) -> Extender:
    return Extender(mirror, lodge)


def pod(name: str, *, rhythm: str = HEAVY, node: str | None = None) -> dict[str, Any]:
    notes = {"reclaimnet.io/rhythm": rhythm} if rhythm else {}
    meta = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "annotations": notes}
    return {"metadata": meta, "spec": {"nodeName": node} if node else {}}


def asked(item: dict[str, Any]) -> Arguments:
    return Arguments(pod=item, names=["a1", "a2", "b1", "b2"])


def see(api: FakeApi, mirror: Mirror, item: dict[str, Any]) -> None:
    """A pod, as the extender's watch shows it."""
    name, node = item["metadata"]["name"], item["spec"].get("nodeName")
    if f"ns/{name}" in api.objects.setdefault(PODS, {}):
        api.patch(PODS, name, {"spec": item["spec"]}, namespace="ns")
    else:
        api.create(PODS, item, namespace="ns")

    def seen() -> bool:
        known = mirror.get(PODS, f"ns/{name}")
        return known is not None and known.node == node

    assert mirror.await_that(seen, 10)


def test_nodes_on_a_link_that_is_full_are_refused_with_a_reason(
    api: FakeApi, mirror: Mirror, extender: Extender
) -> None:
    see(api, mirror, pod("old", node="a1"))
    answer = extender.filter(asked(pod("new")))
    assert answer["NodeNames"] == ["b1", "b2"]
    assert set(answer["FailedNodes"]) == {"a1", "a2"}
    assert answer["FailedNodes"]["a2"].startswith("reclaimnet: a: bursts of 2 jobs")
    scores = {one["Host"]: one["Score"] for one in extender.prioritize(asked(pod("new")))}
    assert scores == {"a1": 0, "a2": 0, "b1": 10, "b2": 10}


def test_a_pod_without_a_rhythm_may_go_anywhere(
    api: FakeApi, mirror: Mirror, extender: Extender
) -> None:
    see(api, mirror, pod("old", node="a1"))
    for rhythm in ("", "unknown-name", "200ms: unreadable"):
        assert extender.filter(asked(pod("new", rhythm=rhythm)))["FailedNodes"] == {}


def test_a_rhythm_is_found_by_its_name(api: FakeApi, mirror: Mirror, extender: Extender) -> None:
    spec = {"period": "300ms", "bursts": [{"length": "180ms", "rate": "1G"}]}
    api.create(RHYTHMS, {"metadata": {"name": "vgg"}, "spec": spec}, namespace="ns")
    assert mirror.await_that(lambda: mirror.get(RHYTHMS, "ns/vgg") is not None, 10)
    see(api, mirror, pod("old", rhythm="vgg", node="a1"))
    assert extender.filter(asked(pod("new", rhythm="vgg")))["NodeNames"] == ["b1", "b2"]


def test_a_pod_that_is_being_bound_is_waited_for(
    api: FakeApi, mirror: Mirror, extender: Extender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the next one would be promised the same gap."""
    monkeypatch.setattr(kube_extender, "SETTLE_S", 60.0)
    see(api, mirror, pod("first"))
    assert len(extender.filter(asked(pod("first")))["NodeNames"]) == 4
    answers: list[dict[str, Any]] = []
    second = threading.Thread(target=lambda: answers.append(extender.filter(asked(pod("second")))))
    second.start()
    see(api, mirror, pod("first", node="b2"))
    second.join()
    assert answers[0]["NodeNames"] == ["a1", "a2"]


def test_a_pod_that_is_deleted_meanwhile_is_not_waited_for(
    api: FakeApi, mirror: Mirror, extender: Extender
) -> None:
    see(api, mirror, pod("first"))
    extender.filter(asked(pod("first")))
    api.remove(PODS, "first", namespace="ns")
    assert mirror.await_that(lambda: mirror.get(PODS, "ns/first") is None, 10)
    assert len(extender.filter(asked(pod("second")))["NodeNames"]) == 4


def test_a_scheduler_that_sends_whole_nodes_gets_whole_nodes_back(
    api: FakeApi, mirror: Mirror, extender: Extender
) -> None:
    see(api, mirror, pod("old", node="a1"))
    items = [{"metadata": {"name": name}} for name in ("a1", "b1")]
    answer = extender.filter(Arguments(pod=pod("new"), nodes={"items": items}))
    assert answer["Nodes"]["items"] == [{"metadata": {"name": "b1"}}]


@pytest.fixture
def url(extender: Extender) -> Iterator[str]:
    server = serve(extender, host="127.0.0.1", port=0)
    answering = threading.Thread(target=server.serve_forever)
    answering.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    answering.join()


def post(url: str, body: bytes) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, data=body), timeout=10) as answer:
        return json.loads(answer.read())


def test_over_http(url: str) -> None:
    body = json.dumps({"Pod": pod("p"), "NodeNames": ["a1"], "Nodes": None}).encode()
    assert post(f"{url}/filter", body) == {"NodeNames": ["a1"], "FailedNodes": {}, "Error": ""}
    assert post(f"{url}/prioritize", body) == [{"Host": "a1", "Score": 10}]
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        assert b'reclaimnet_kube_filtered_pods_total{rhythm="yes"} 1.0' in answer.read()


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/filter", b"{", 400),
        ("/filter", b"{}", 400),
        ("/filter", b'{"Pod": {}}', 400),
        ("/prioritize", b'{"Pod": 1}', 400),
        ("/bind", b"{}", 404),
    ],
)
def test_what_no_scheduler_would_send_is_refused(
    url: str, path: str, body: bytes, code: int
) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(url + path, body)
    refused.value.close()
    assert refused.value.code == code


def test_an_address_that_is_taken_is_said(extender: Extender, url: str) -> None:
    port = int(url.rpartition(":")[2])
    with pytest.raises(UsageError, match="choose another address with --listen"):
        serve(extender, host="127.0.0.1", port=port)
