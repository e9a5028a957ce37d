"""What of a chain is on disk: the wish, its state, and what people ask of whoever keeps it."""

import json
import shutil
from pathlib import Path
from typing import Final

import msgspec

from reclaimnet.apps.chain_wish import Wish
from reclaimnet.apps.notes import write_down
from reclaimnet.errors import BadConfig
from reclaimnet.model.chain import (
    CancelAsked,
    ChainEvent,
    ChainState,
    NextAsked,
)

ASKED: Final[dict[str, ChainEvent]] = {"cancel": CancelAsked(), "next": NextAsked()}
"""What people ask of a keeper, each by a file in the chain's folder."""


def begin_folder(folder: Path, wish: Wish) -> None:
    """Nothing of an earlier life must look like a sign of this one, but for the saved state."""
    for name in ("links", "logs"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True, mode=0o700)
    (folder / "state").mkdir(exist_ok=True)
    for name in ("state.json", *ASKED):
        (folder / name).unlink(missing_ok=True)
    write_down(folder / "wish.json", msgspec.json.encode(wish).decode())


def kept_wish(folder: Path) -> Wish | None:
    try:
        return msgspec.json.decode((folder / "wish.json").read_bytes(), type=Wish)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise BadConfig(f"{folder}/wish.json cannot be read ({error})") from error


def kept_state(folder: Path, name: str) -> ChainState:
    """Without one, or with a damaged one, the queue itself tells: jobs are known by comment."""
    try:
        return msgspec.json.decode((folder / "state.json").read_bytes(), type=ChainState)
    except (OSError, msgspec.DecodeError, json.JSONDecodeError):
        return ChainState(name=name)


def keep_state(folder: Path, state: ChainState) -> None:
    write_down(folder / "state.json", msgspec.json.encode(state).decode())
