"""Prepare: what is done for a move before anybody asks for one?"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    copies: bool
    """Checkpoints are copied to a standby as they are taken."""
    warm: bool
    """A destination starts the process, and fetches the last copy, before the state comes."""
    precopy: bool
    """A long transfer is begun while the job still runs."""


STANDBY: Final = Preparation(copies=True, warm=True, precopy=True)
STOP_AND_COPY: Final = Preparation(copies=False, warm=False, precopy=False)
