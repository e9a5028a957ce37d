"""Bundles: deterministic, honouring what is to be left out, and safe to unpack."""

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from reclaimnet.apps import bundle
from reclaimnet.errors import Damaged, UsageError


def write(directory: Path, *names: str) -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"this is {name}\n")


def names(data: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return tar.getnames()


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    for place, order in (("one", ("b.py", "a/x.py")), ("two", ("a/x.py", "b.py"))):
        write(tmp_path / place, *order)
        os.utime(tmp_path / place / "b.py", (len(place) * 1000, 7))
    (tmp_path / "two" / "b.py").chmod(0o600)
    one, two = bundle.pack(tmp_path / "one"), bundle.pack(tmp_path / "two")
    assert one == two
    assert names(one) == ["a", "a/x.py", "b.py"]


def test_what_is_packed_comes_out_again(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "deep" / "target"
    write(source, "train.py", "lib/model.py", "päth/ü" + "x" * 150 + ".py")
    (source / "go.sh").write_text("#!/bin/sh\n")
    (source / "go.sh").chmod(0o755)
    (source / "empty").mkdir()
    (source / "lib" / "same.py").symlink_to("../train.py")
    bundle.unpack(bundle.pack(source), target)
    assert (target / "lib" / "same.py").readlink() == Path("../train.py")
    assert (target / "lib" / "model.py").read_text() == "this is lib/model.py\n"
    assert os.access(target / "go.sh", os.X_OK)
    assert not os.access(target / "train.py", os.X_OK)
    assert (target / "empty").is_dir()
    assert bundle.pack(target) == bundle.pack(source)


def test_ignored_things_stay_at_home(tmp_path: Path) -> None:
    write(
        tmp_path,
        "train.py",
        ".git/HEAD",
        ".venv/bin/python",
        "pkg/__pycache__/x.pyc",
        "pkg/a.log",
        "keep.log",
        "data/big.bin",
        "sub/data/small.bin",
        "top.txt",
        "sub/top.txt",
        "runs/1/out/x",
        "runs/x",
        "v1.ckpt",
        "v2.ckpt",
    )
    (tmp_path / ".rnignore").write_text(
        "# what not to send\n*.log\n!keep.log\n/data/\n/top.txt\nruns/**/out\nv[!2].ckpt\n"
    )
    files = [name for name in names(bundle.pack(tmp_path)) if (tmp_path / name).is_file()]
    assert files == [
        ".rnignore",
        "keep.log",
        "runs/x",
        "sub/data/small.bin",
        "sub/top.txt",
        "train.py",
        "v2.ckpt",
    ]


@pytest.mark.needs("git")
@pytest.mark.parametrize(
    "patterns",
    [
        "*.log",
        "*.log\n!keep.log",
        "/a",
        "a/",
        "a/b",
        "a/*",
        "a/**",
        "**/b",
        "a/**/c.py",
        "*/c.py",
        "?.py",
        "[ab].py",
        "[!a].py",
        "[^a].py",
        "x[[]y",
        "\\#odd\n\\!odd",
        "# comment\n\n  ",
        "a\n!a/b",
        "*\n!a.py",
        ".*",
    ],
)
def test_what_is_left_out_is_what_git_would_leave_out(tmp_path: Path, patterns: str) -> None:
    write(
        tmp_path,
        *("a.py", "b.py", "keep.log", "x.log", "x[y", "#odd", "!odd", ".hidden", "b/a"),
        *("a/b/c.py", "a/c.py", "a/b.py", "a/x/y/c.py", "d/a/b/f", "d/c.py", "d/keep.log"),
    )
    (tmp_path / ".rnignore").write_text(patterns)
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    listed = subprocess.run(
        [*git, "ls-files", "-z", "--others", "--exclude-from", str(tmp_path / ".rnignore")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    packed = [name for name in names(bundle.pack(tmp_path)) if (tmp_path / name).is_file()]
    assert sorted(packed) == sorted(listed.rstrip("\0").split("\0"))


def test_a_pattern_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / ".rnignore").write_text("ok\n[z-a]\n")
    with pytest.raises(UsageError, match=r"'\[z-a\]' is not a pattern"):
        bundle.pack(tmp_path)


def test_too_large_names_the_three_largest_and_two_ways_out(tmp_path: Path) -> None:
    sizes = {"data/a.bin": 20, "data/b.bin": 20, "model.pt": 30, "c.bin": 10, "d.bin": 1}
    for name, mib in sizes.items():
        write(tmp_path, name)
        os.truncate(tmp_path / name, mib << 20)
    with pytest.raises(UsageError) as refusal:
        bundle.pack(tmp_path)
    text = str(refusal.value)
    assert "data/ (40.0 MiB), model.pt (30.0 MiB), c.bin (10.0 MiB);" in text
    assert "81.0 MiB" in text
    assert ".rnignore" in text
    assert "--no-ship" in text


def test_a_link_that_leads_out_is_refused_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to("/usr/share")
    with pytest.raises(UsageError, match=r"data is a link to /usr/share.*\.rnignore"):
        bundle.pack(tmp_path)


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(-(-size // 512) * 512)


END = bytes(1024)


@pytest.mark.parametrize(
    "data",
    [
        member("../escaped"),
        member("/tmp/escaped"),
        member("a/../../escaped"),
        member("./a"),
        member("link", tarfile.SYMTYPE, "../outside"),
        member("link", tarfile.SYMTYPE, "/etc"),
        member("in/link", tarfile.SYMTYPE, "../../outside"),
        member("link", tarfile.SYMTYPE, "sub") + member("link/file"),
        member("hard", tarfile.LNKTYPE, "/etc/passwd"),
        member("dev", tarfile.CHRTYPE),
        member("pipe", tarfile.FIFOTYPE),
        member("a") + member("a"),
        member("bomb", size=bundle.MAX_BUNDLE_BYTES + 1),
        b"not a tar at all" * 100,
        member("cut", size=5000)[:1000],
    ],
)
def test_a_bundle_that_could_do_harm_is_refused_whole(tmp_path: Path, data: bytes) -> None:
    target = tmp_path / "target"
    with pytest.raises(Damaged):
        bundle.unpack(member("first") + data + END if data[:3] != b"not" else data, target)
    assert list(tmp_path.iterdir()) in ([], [target])
    assert not target.exists() or not list(target.iterdir())


def test_unpacking_never_writes_over_a_file_or_through_a_link(tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
    target.mkdir()
    elsewhere.write_text("precious")
    (target / "a").symlink_to(elsewhere)
    with pytest.raises(OSError, match="File exists"):
        bundle.unpack(member("a", size=10) + END, target)
    assert elsewhere.read_text() == "precious"
