"""The files of a job that CRIU saves come back as they were."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from reclaimnet.adapters.linux import criu
from reclaimnet.errors import Damaged


def folders(place: Path) -> dict[str, Path]:
    made = {name: place / name for name in ("work", "tmp")}
    for folder in made.values():
        folder.mkdir(parents=True)
    return made


def test_a_file_of_two_names_stays_one_file(tmp_path: Path) -> None:
    before, after = folders(tmp_path / "before"), folders(tmp_path / "after")
    (before["work"] / "a").write_text("state")
    os.link(before["work"] / "a", before["work"] / "b")
    os.link(before["work"] / "a", before["tmp"] / "c")
    (tmp_path / "log").touch()
    (after["work"] / "b").write_text("of the bundle")
    criu.pack(tmp_path, before, {}, main=5, log=tmp_path / "log")
    assert criu.unpack(tmp_path, after).main == 5
    found = [after["work"] / "a", after["work"] / "b", after["tmp"] / "c"]
    assert [path.read_text() for path in found] == ["state"] * 3
    assert len({path.stat().st_ino for path in found}) == 1


@pytest.mark.parametrize(
    "target", ["work/out/secret", "work/../secret", "secret", "/secret", "x/a"]
)
def test_a_second_name_of_a_file_that_is_not_the_jobs_is_refused(
    tmp_path: Path, target: str
) -> None:
    places = folders(tmp_path / "places")
    (tmp_path / "places" / "secret").write_text("of the owner")
    (tmp_path / criu.META).write_text('{"main":5,"log_bytes":0,"gone":[]}')
    with tarfile.open(tmp_path / criu.FILES, "w") as tar:
        for name, kind, linkname in (
            ("work/out", tarfile.SYMTYPE, str(tmp_path / "places")),
            ("work/mine", tarfile.LNKTYPE, target),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, linkname
            tar.addfile(entry, io.BytesIO())
    with pytest.raises(Damaged):
        criu.unpack(tmp_path, places)
    assert not (places["work"] / "mine").exists()
