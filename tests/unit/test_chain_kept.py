"""What a keeper of a chain writes down for whoever comes after it."""

import pytest
from tests.vault_files import fill, small_disk

from reclaimnet.apps.chain_kept import keep_state, kept_state
from reclaimnet.model.chain import ChainState
from reclaimnet.model.units import MIB


@pytest.mark.needs("root")
def test_what_a_keeper_must_not_forget_is_kept_on_a_full_disk_too() -> None:
    with small_disk(MIB) as folder:
        keep_state(folder, ChainState(name="c", count=1))
        with fill(folder, leave=0):
            later = ChainState(name="c", count=2)
            keep_state(folder, later)
            assert kept_state(folder, "c") == later
            assert sorted(path.name for path in folder.iterdir()) == ["filler", "state.json"]
