"""Arbitrate: which GPUs, if any, does a node promise to a probe?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reclaimnet.model.market import Gpu, GpuId, Offer
from reclaimnet.model.probing import Probe
from reclaimnet.model.units import show_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Booth:
    """What a node knows of itself when a probe arrives."""

    offer: Offer | None
    vacant: tuple[Gpu, ...]
    leaving: bool
    """GPUs of this node are under notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    gpus: tuple[GpuId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Denied:
    reasons: tuple[str, ...]


Arbitrate = Callable[[Probe, Booth], Granted | Denied]


def first_fit(probe: Probe, booth: Booth) -> Granted | Denied:
    """The first vacant GPUs by index, if the terms and the count allow."""
    reasons = list(_objections(probe, booth))
    if reasons:
        return Denied(reasons=tuple(reasons))
    chosen: Sequence[Gpu] = sorted(booth.vacant, key=lambda gpu: gpu.index)[: probe.shape.gpus]
    return Granted(gpus=tuple(gpu.id for gpu in chosen))


def _objections(probe: Probe, booth: Booth) -> Sequence[str]:
    if booth.offer is None:
        return ("lends nothing",)
    users = booth.offer.terms.users
    if users and probe.shape.user not in users:
        return (f"does not lend to {probe.shape.user}",)
    if len(booth.vacant) < probe.shape.gpus:
        under_notice = ", others are under notice" if booth.leaving else ""
        wanted = show_count(probe.shape.gpus, "GPU")
        return (f"{len(booth.vacant)} of {wanted} vacant{under_notice}",)
    return ()
