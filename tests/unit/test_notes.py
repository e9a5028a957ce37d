"""Notes are written down whatever the disk says, if there was one before."""

from pathlib import Path

import pytest
from tests.vault_files import fill, small_disk

from reclaimnet.apps.notes import write_down
from reclaimnet.model.units import MIB


def test_a_note_replaces_the_one_before(tmp_path: Path) -> None:
    note = tmp_path / "note.json"
    for text in ("a long first text", "a second"):
        write_down(note, text)
        assert note.read_text() == text
    assert list(tmp_path.iterdir()) == [note]


@pytest.mark.needs("root")
def test_on_a_full_disk_a_note_takes_the_place_of_the_one_before() -> None:
    with small_disk(MIB) as disk:
        note = disk / "note.json"
        write_down(note, "a long first text")
        with fill(disk, leave=0):
            write_down(note, "a second")
            assert note.read_text() == "a second"
            with pytest.raises(OSError, match="No space"):
                write_down(disk / "another.json", "there was none before")
            assert sorted(path.name for path in disk.iterdir()) == ["filler", "note.json"]
