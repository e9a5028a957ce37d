"""A real campus on hosts in network namespaces, for one test: agents, each under a guard."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.live.waiting import WAIT_S, until

from reclaimnet.adapters.linux.testbed import Testbed
from reclaimnet.apps import testbed, up
from reclaimnet.apps.client import Gateway
from reclaimnet.apps.config import load

SOURCE = Path(__file__).parents[2] / "src"


class NamespaceCampus:
    def __init__(self, bed: Testbed, folder: Path, env: dict[str, str]) -> None:
        self.bed = bed
        self._env = env
        rn = [sys.executable, "-m", "reclaimnet.apps.cli"]
        argv = [*rn, "up", "--gateway-port", "0", "--listen", str(bed.address)]
        subprocess.run(argv, env=env, check=True, capture_output=True, timeout=WAIT_S)
        self._left = json.loads((folder / "state" / "reclaimnet" / "campus.json").read_text())
        # What it needs to know is on disk only now.
        self.gateway = Gateway(load(env=env, project=folder / "none", system=folder / "none"))

    def start(self, host: str, gpus: int) -> "subprocess.Popen[Any]":
        """An agent that will lend them."""
        return testbed.run_agent(
            self.bed,
            host,
            nats_url=self._left["nats_url"],
            nats_token=self._left["nats_token"],
            gpus=gpus,
            env=self._env,
        )

    @property
    def nats_url(self) -> str:
        return str(self._left["nats_url"])

    @property
    def agent_env(self) -> dict[str, str]:
        """What an agent that is started by other means needs to know."""
        return {**self._env, "RECLAIMNET_NATS__TOKEN": self._left["nats_token"]}

    def await_vacant(self, host: str, gpus: int) -> None:
        def all_vacant() -> bool:
            cards = [node.card for node in self.gateway.nodes()]
            return any(card.node == host and len(card.vacant) == gpus for card in cards)

        until(all_vacant, f"{host} lends {gpus} GPUs")


@contextlib.contextmanager
def namespace_campus(
    folder: Path, mark: str, racks: list[dict[str, object]]
) -> Iterator[NamespaceCampus]:
    """`mark` is a letter that no other test of the same process uses."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("RECLAIMNET_")}
    env |= {"XDG_STATE_HOME": str(folder / "state"), "XDG_CONFIG_HOME": str(folder / "config")}
    env |= {"PYTHONPATH": str(SOURCE)}
    table = {"mark": f"{mark}{os.getpid()}", "management": True, "rack": racks}
    table["network"] = testbed.own_network()
    with testbed.running(testbed.parse_config(table)) as bed:
        config = load(env=env, project=folder / "none", system=folder / "none")
        try:
            yield NamespaceCampus(bed, folder, env)
        finally:
            up.end_all(config)
