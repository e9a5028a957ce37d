"""The options of `rn agent`, as given; what they mean here is worked out where it starts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reclaimnet.apps.config import DEFAULT_GUEST_DISK, DEFAULT_VAULT_QUOTA
from reclaimnet.model.units import MINUTE, SECOND

NO_SANDBOX: Final = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    join: str | None = None
    token: str | None = None
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
        argv = ["--notice", f"{self.notice / SECOND}s", "--vault-quota", str(self.vault_quota)]
        argv += ["--gpus", str(self.gpus)] if self.gpus is not None else []
        argv += ["--lend"] if self.lend else []
        argv += ["--suite", self.suite]
        argv += ["--guard", str(self.guard)] if self.guard is not None else []
        argv += ["--address", self.address] if self.address is not None else []
        argv += ["--uplink", self.uplink] if self.uplink is not None else []
        argv += ["--grace", f"{self.grace / SECOND}s"] if self.grace is not None else []
        argv += ["--zone", self.zone] if self.zone is not None else []
        argv += ["--topology", str(self.topology.resolve())] if self.topology is not None else []
        argv += ["--sandbox", self.guests, "--guest-disk", str(self.guest_disk)]
        argv += [word for network in self.campus_nets for word in ("--campus-net", network)]
        argv += [word for share in self.shares for word in ("--share", str(share.resolve()))]
        return argv
