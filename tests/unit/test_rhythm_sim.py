"""Contenders on the simulated network: what each of them is for."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from reclaimnet.apps.bench.rhythm import render, simulated
from reclaimnet.apps.bench.rhythm_mixes import LINK_RATE
from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.units import SECOND
from reclaimnet.sim.rhythm import CONTENDERS, PROFILES, Piece, Run, piece, place, simulate

LINKS = [Link(id=LinkId(f"l{i}"), rate=LINK_RATE) for i in range(8)]


def pieces(*models: str, high: int = 1) -> list[Piece]:
    return [
        piece(f"{m}-{i}", m, rate=LINK_RATE, iterations=30, priority=int(i < high))
        for i, m in enumerate(models)
    ]


def runs(contender: str, jobs: list[Piece], *, links: int = 1) -> dict[str, Run]:
    there = LINKS if contender == "ideal" else LINKS[:links]
    found, _ = simulate(contender, jobs, there, rng=random.Random(1))
    assert sorted(found) == sorted(p.job for p in jobs)
    return {str(job): run for job, run in found.items()}


def mean_jct(found: dict[str, Run]) -> float:
    return sum(run.jct for run in found.values()) / len(found) / SECOND


def test_conducted_jobs_hardly_notice_each_other() -> None:
    jobs = pieces("vgg16x8", "vgg16x8", "vgg16x8")
    ideal, default, rotated = (runs(c, jobs) for c in ("ideal", "default", "rotate"))
    assert mean_jct(rotated) < 1.05 * mean_jct(ideal)
    assert mean_jct(rotated) < 0.805 * mean_jct(default)
    assert rotated["vgg16x8-0"].jct < 1.02 * ideal["vgg16x8-0"].jct


def test_exclusive_jobs_wait_for_each_other() -> None:
    jobs = pieces("vgg16x8", "vgg16x8")
    found = runs("exclusive", jobs)
    assert found["vgg16x8-1"].started >= found["vgg16x8-0"].ended


def test_high_priority_is_kept_even_where_not_all_fit() -> None:
    jobs = pieces("bertx32", "vgg19x4", "vgg16x8", "gpt2x8")
    ideal, rotated = runs("ideal", jobs), runs("rotate", jobs)
    assert rotated["bertx32-0"].jct < 1.02 * ideal["bertx32-0"].jct


@pytest.mark.parametrize("models", [("gpt2x32", "gpt2x4"), ("vgg19x32", "bertx8")])
def test_where_low_does_not_fit_beside_high_all_fare_no_worse_than_unconducted(
    models: tuple[str, ...],
) -> None:
    jobs = [
        piece(f"{m}-{i}", m, rate=LINK_RATE, iterations=8_000 // PROFILES[m][0], priority=not i)
        for i, m in enumerate(models)
    ]
    ranked = [replace(LINKS[0], ranked=True)]
    ideal, default = runs("ideal", jobs), runs("default", jobs)
    found, _ = simulate("rotate", jobs, ranked, rng=random.Random(1))
    rotated = {str(job): run for job, run in found.items()}
    assert rotated[jobs[0].job].jct <= 1.02 * ideal[jobs[0].job].jct
    assert mean_jct(rotated) <= 1.002 * mean_jct(default)


def test_placement_by_fit_puts_like_with_like() -> None:
    jobs = pieces("vgg16x8", "vgg16x32", "vgg16x8", "vgg16x32", high=0)
    links = place("rotate", jobs, LINKS[:2]).links
    assert links[jobs[0].job] == links[jobs[2].job] != links[jobs[1].job] == links[jobs[3].job]
    assert mean_jct(runs("rotate", jobs, links=2)) <= mean_jct(runs("default", jobs, links=2))


@pytest.mark.parametrize("contender", CONTENDERS)
def test_the_same_seed_gives_the_same_run(contender: str) -> None:
    jobs = pieces("vgg16x8", "bertx8", "gpt2x8")
    assert runs(contender, jobs) == runs(contender, jobs)


def test_many_mixes() -> None:
    found = simulated(seed=5, jobs=40)
    assert found["jobs"] == 40
    assert set(found["results"]) == set(CONTENDERS)
    assert found["results"]["rotate"]["jct"] < found["results"]["default"]["jct"]
    assert found["bars"]["worst_high_slowdown"] < 1.02


def test_what_comes_out_is_told_in_lines_for_people(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = simulated(seed=5, jobs=6)
    drift = {"job": "vgg16x8", "computes_longer_by": 0.1, "iterations_to_recover": 3}
    both = {key: found[key] for key in ("results", "bars")}
    render({**both, "mixes": [], "drift": drift, "simulated": found})
    out = capsys.readouterr().out
    assert "{" not in out
    told = {line[:44].strip(): line[44:].strip() for line in out.splitlines()}
    assert told["iterations to recover"] == "3"
    assert told["computes longer by"] == "+10.0%"
    assert told["mixes with lower jct"] == str(found["bars"]["mixes_with_lower_jct"])
