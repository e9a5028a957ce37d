"""Files of jobs that do odd things to them: looked through and removed all the same."""

import os
from pathlib import Path

import pytest

from reclaimnet.adapters.linux.attempts.job_files import entries_below, remove_tree
from reclaimnet.apps.live.scratch import fresh_folder

DEEP = 2200
"""Deeper than functions call each other, and than a path is long."""


def nest(folder: Path, depth: int) -> None:
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)


def test_what_is_nested_deeper_than_a_path_is_long_is_removed(tmp_path: Path) -> None:
    nest(tmp_path, DEEP)
    remove_tree(tmp_path / "d")
    assert not list(tmp_path.iterdir())


def test_files_are_found_deeper_than_functions_call_each_other(tmp_path: Path) -> None:
    nest(tmp_path, DEEP // 2)
    *folders, file = entries_below(tmp_path)
    assert len(folders) == DEEP // 2
    assert file.name == "file"
    remove_tree(tmp_path / "d")


def test_what_may_not_be_entered_is_removed_and_what_a_link_leads_to_is_not(tmp_path: Path) -> None:
    inner = tmp_path / "job" / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "file").write_text("x")
    (inner / "link").symlink_to(tmp_path / "others")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "precious").write_text("x")
    inner.chmod(0)
    inner.parent.chmod(0o500)
    remove_tree(tmp_path / "job")
    assert [path.name for path in tmp_path.iterdir()] == ["others"]
    assert (tmp_path / "others" / "precious").exists()


@pytest.mark.parametrize("what", ["a file", "a link", "nothing"])
def test_what_a_job_has_put_in_the_place_of_a_folder_goes(tmp_path: Path, what: str) -> None:
    place, others = tmp_path / "place", tmp_path / "others"
    others.mkdir()
    (others / "precious").write_text("x")
    for cleared in (remove_tree, fresh_folder):
        if what == "a file":
            place.write_text("x")
        elif what == "a link":
            place.symlink_to(others)
        cleared(place)
        assert place.exists() == (cleared is fresh_folder)
        assert not place.is_symlink()
    assert (others / "precious").exists()
