"""A Kubernetes cluster as the extender and the controller see it, from one mirror."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from reclaimnet.adapters.kube.client import LINKS, NODES, PODS, RHYTHMS, Api, Object
from reclaimnet.adapters.kube.mirror import Mirror
from reclaimnet.adapters.kube.read import (
    inline_tune,
    is_inline,
    link_of,
    named_tune_of,
    node_of,
    pod_of,
)
from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.pods import KubeNode, NamedTune, Pod, SharedLink, Tune
from reclaimnet.policy.lodge import Lodger

_PARSED: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """At one moment."""

    pods: tuple[Pod, ...]
    nodes: dict[str, KubeNode]
    links: tuple[SharedLink, ...]
    tunes: dict[str, NamedTune]
    reach: dict[str, tuple[LinkId, ...]]
    """The links of each node."""
    lodgers: dict[str, Lodger]
    """The pods with a rhythm that are on a node, by uid."""
    wrong: dict[str, str]
    """Why the rhythm of a pod, by uid, cannot be used."""
    wrong_links: tuple[tuple[Object, str], ...] = ()
    """Links as they are, and why they cannot be used."""

    @property
    def capacities(self) -> tuple[Link, ...]:
        return tuple(shared.link for shared in self.links)

    def lodger(self, pod: Pod, *, node: str) -> tuple[Lodger | None, str]:
        """The pod as one that talks, if it has a rhythm; or why that cannot be used."""
        tune, wrong = self._tune(pod)
        if tune is None:
            return None, wrong
        return Lodger(job=pod.job, node=node, tune=tune, priority=pod.priority), ""

    def _tune(self, pod: Pod) -> tuple[Tune | None, str]:
        if not pod.rhythm:
            return None, ""
        if is_inline(pod.rhythm):
            return _parsed(pod.rhythm)
        named = self.tunes.get(f"{pod.namespace}/{pod.rhythm}")
        if named is None:
            return None, f"there is no Rhythm {pod.rhythm} in namespace {pod.namespace}"
        return named.tune, named.wrong


def mirror_of(api: Api) -> Mirror:
    return Mirror(api, {LINKS: link_of, RHYTHMS: named_tune_of, NODES: node_of, PODS: pod_of})


class Views:
    """Makes a view only when the cluster has changed."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._made: tuple[int, View] | None = None

    def now(self) -> View:
        version = self._mirror.version
        if self._made is None or self._made[0] != version:
            self._made = version, _view(self._mirror)
        return self._made[1]


def _view(mirror: Mirror) -> View:
    nodes: dict[str, KubeNode] = {node.name: node for node in mirror.all(NODES)}
    links: tuple[SharedLink, ...] = tuple(mirror.all(LINKS))
    view = View(
        pods=tuple(mirror.all(PODS)),
        nodes=nodes,
        links=links,
        tunes={named.key: named for named in mirror.all(RHYTHMS)},
        reach={
            node.name: tuple(shared.link.id for shared in links if shared.carries(node))
            for node in nodes.values()
        },
        lodgers={},
        wrong={},
        wrong_links=tuple(mirror.unreadable(LINKS)),
    )
    for pod in view.pods:
        if pod.over or not pod.rhythm:
            continue
        lodger, wrong = view.lodger(pod, node=pod.node or "")
        if wrong:
            view.wrong[pod.uid] = wrong
        elif lodger is not None and pod.node is not None:
            view.lodgers[pod.uid] = lodger
    return view


@lru_cache(maxsize=_PARSED)
def _parsed(text: str) -> tuple[Tune | None, str]:
    try:
        return inline_tune(text), ""
    except ValueError as error:
        return None, str(error)
