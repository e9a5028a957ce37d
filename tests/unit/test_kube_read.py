"""Objects of the API server as our nouns, and what is wrong with those that cannot be read."""

from typing import Any

import pytest

from reclaimnet.adapters.kube import read
from reclaimnet.model.pods import Pod
from reclaimnet.model.units import MILLISECOND, SECOND, parse_rate


def test_a_rhythm_in_one_line() -> None:
    beat = read.inline_beat("1s: 80ms@400M+100ms, 50ms@1G")
    assert beat.period == SECOND
    assert [(b.start, b.length) for b in beat.bursts] == [
        (100 * MILLISECOND, 80 * MILLISECOND),
        (950 * MILLISECOND, 50 * MILLISECOND),
    ]
    assert beat.bursts[0].demand == parse_rate("400M")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("200ms:", "is not a burst"),
        ("200ms: often", "is not a burst"),
        ("sometimes: 20ms@1G", "is not a duration"),
        ("200ms: 20ms@fast", "is not a rate"),
        ("200ms: 300ms@1G", "inside of their period"),
        ("200ms: 50ms@1G+180ms", "inside of their period"),
        ("200ms: 50ms@1G+10ms, 50ms@1G+20ms", "must not overlap"),
        ("200ms: 0ms@1G", "above zero"),
        ("200ms: 5ms@0", "above zero"),
        ("0s: 0s@1G", "above zero"),
        ("1s: " + ", ".join(["1ms@1G"] * 17), "1 to 16 bursts"),
    ],
)
def test_what_is_wrong_with_a_rhythm_is_said(text: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        read.inline_beat(text)


def test_a_name_is_not_a_rhythm() -> None:
    assert not read.is_inline("vgg16.large")
    assert read.is_inline("200ms: 20ms@1G")


def item(**annotations: str) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "p",
            "namespace": "ns",
            "uid": "u",
            "annotations": {f"reclaimnet.io/{k}": v for k, v in annotations.items()},
        },
        "spec": {},
    }


def test_a_pod_as_the_api_server_has_it_just_after_creation() -> None:
    assert read.pod_of(item()) == Pod(
        namespace="ns", name="p", uid="u", job="ns/p", grace=30 * SECOND
    )


def test_a_pod_that_is_being_evicted() -> None:
    given = item(lend="True", job="training")
    given["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:10Z"
    given["spec"] = {"nodeName": "n", "priority": 1000, "terminationGracePeriodSeconds": 0}
    given["status"] = {"phase": "Running", "conditions": None}
    pod = read.pod_of(given)
    assert (pod.lends, pod.job, pod.priority, pod.grace) == (True, "ns/training", 1000, 0)
    assert pod.leaves_at == 1_767_225_610 * SECOND
    assert read.pod_of(item(lend="no")).lends is False


@pytest.mark.parametrize("spec", [{}, {"rate": "0"}, {"rate": "1G", "backgroundPercent": 100}])
def test_a_link_that_carries_nothing_is_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"rate|carries"):
        read.link_of({"metadata": {"name": "l"}, "spec": spec})


def test_a_link_is_of_the_nodes_with_all_of_its_labels() -> None:
    spec = {"rate": "10G", "nodeSelector": {"matchLabels": {"rack": "a", "zone": "z"}}}
    link = read.link_of({"metadata": {"name": "l"}, "spec": spec})
    node = {"metadata": {"name": "n", "labels": {"rack": "a", "zone": "z", "x": "y"}}}
    assert link.carries(read.node_of(node))
    assert not link.carries(read.node_of({"metadata": {"name": "n", "labels": {"rack": "a"}}}))
