"""The options of `rn agent`, as given; what they mean here is worked out where it starts."""

import json
import logging
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from reclaimnet.apps.config import DEFAULT_GUEST_DISK, DEFAULT_VAULT_QUOTA
from reclaimnet.apps.notes import write_down
from reclaimnet.model.market import NodeId
from reclaimnet.model.units import MINUTE, SECOND

FILE: Final = "started.json"
"""In the agent's folder: what to tell `rn` to start it as it was started last."""
NO_SANDBOX: Final = "off"

_log = logging.getLogger("reclaimnet.agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    join: str | None = None
    token: str | None = None
    token_file: Path | None = None
    """Where the token was read, if it was in a file."""
    name: str | None = None
    gpus: int | None = None
    """How many to declare; None: those that are found."""
    lend: bool = False
    notice: int = MINUTE
    vault_quota: int = DEFAULT_VAULT_QUOTA
    suite: str = "standby"
    guard: Path | None = None
    address: str | None = None
    uplink: str | None = None
    grace: int | None = None
    zone: str | None = None
    topology: Path | None = None
    guests: str = NO_SANDBOX
    shares: tuple[Path, ...] = ()
    guest_disk: int = DEFAULT_GUEST_DISK
    campus_nets: tuple[str, ...] = ()

    def argv(self) -> list[str]:
        """The same for another process, but for who it is, where the campus is and its secret."""
        lending = [("--notice", f"{self.notice / SECOND}s"), *([("--lend",)] if self.lend else [])]
        return [word for words in [*lending, *self._living()] for word in words]

    def again(self, node: NodeId) -> list[str]:
        """What a person says to start it once more: whether it lends is kept elsewhere, and what is
        usual need not be said."""
        usual = Options()._living()
        unusual = [words for words in self._living() if words not in usual]
        if self.token_file is not None:
            # The campus is on another machine.
            unusual += [("--token-file", str(self.token_file.resolve()))]
            unusual += [("--join", self.join)] if self.join is not None else []
        said = [word for words in unusual for word in words]
        return ["agent", "--name", node, *said, "--detach"]

    def _living(self) -> list[tuple[str, ...]]:
        """How it lives, whatever it lends."""
        said: list[tuple[str, ...]] = [("--vault-quota", str(self.vault_quota))]
        said += [("--gpus", str(self.gpus))] if self.gpus is not None else []
        said += [("--suite", self.suite)]
        said += [("--guard", str(self.guard))] if self.guard is not None else []
        said += [("--address", self.address)] if self.address is not None else []
        said += [("--uplink", self.uplink)] if self.uplink is not None else []
        said += [("--grace", f"{self.grace / SECOND}s")] if self.grace is not None else []
        said += [("--zone", self.zone)] if self.zone is not None else []
        said += [("--topology", str(self.topology.resolve()))] if self.topology is not None else []
        said += [("--sandbox", self.guests), ("--guest-disk", str(self.guest_disk))]
        said += [("--campus-net", network) for network in self.campus_nets]
        said += [("--share", str(share.resolve())) for share in self.shares]
        return said


def keep_start(folder: Path, node: NodeId, options: Options) -> None:
    """For whoever is told later how to start it once more. An agent lives without that, too."""
    try:
        write_down(folder / FILE, json.dumps(options.again(node)))
    except OSError as error:
        _log.warning("how this agent was started cannot be written down: %s", error)


def start_again(folder: Path, *, state: Path | None) -> str:
    """The command that starts the folder's agent as it was started last. `state` is what has to be
    said of where it is kept."""
    try:
        words = msgspec.json.decode((folder / FILE).read_bytes(), type=list[str])
    except (OSError, ValueError):
        words = Options().again(NodeId(folder.name))
    place = ["--state", str(state)] if state is not None else []
    return shlex.join(["rn", *place, *words])
