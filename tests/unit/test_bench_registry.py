"""Every bench can be found by its name, and takes what it says it takes."""

import importlib
import inspect
from pathlib import Path

import pytest

from reclaimnet.apps import bench, cli
from reclaimnet.apps.bench import registry


def parameters(name: str) -> set[str]:
    return set(
        inspect.signature(importlib.import_module(f"{bench.__name__}.{name}").run).parameters
    )


def test_the_help_names_every_bench_and_what_some_take(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command(["bench", "--help"]) == 0
    told = " ".join(capfd.readouterr().out.split())
    assert f"NAME is one of {', '.join(registry.names())}." in told
    for option, sentence in (("trace", "run on; {} take it"), ("live", "NATS; {} can")):
        takers = [name for name in registry.names() if option in parameters(name)]
        assert sentence.format(" and ".join(takers)) in told


@pytest.mark.parametrize("name", ["place", "swarm"])
def test_a_trace_is_refused_where_none_is_replayed(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run_command(["bench", name, "--quick", "--trace", str(tmp_path)]) == 2
    assert f"rn: bench {name} takes no --trace; leave it out." in capfd.readouterr().err


def test_real_agents_are_refused_where_there_are_none(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command(["bench", "loss", "--quick", "--live"]) == 2
    assert "rn: bench loss takes no --live; leave it out." in capfd.readouterr().err
