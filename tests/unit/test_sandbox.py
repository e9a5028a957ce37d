"""What owners ask of the sandbox is had or refused, and what guests write is not believed."""

import os
import sys
from pathlib import Path

import pytest

from reclaimnet.adapters.linux import sandbox
from reclaimnet.adapters.linux.page import GUEST_PAGE, TwoPages, guest_page, make_page, open_page
from reclaimnet.adapters.linux.sandbox import Network, Sandbox
from reclaimnet.adapters.vault.store import Source, Vault
from reclaimnet.apps.agent_options import Options
from reclaimnet.apps.agent_start import _sandbox
from reclaimnet.errors import Unavailable, UsageError
from reclaimnet.model.market import JobId
from reclaimnet.model.page import PAGE_BYTES, Word
from reclaimnet.model.units import GIB, MIB
from reclaimnet.model.work import Saving


def test_without_bubblewrap_a_sandbox_is_refused(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="bubblewrap is not installed"):
        _sandbox(Options(guests="none"), hidden=tmp_path)


def test_with_a_bubblewrap_that_is_too_old_a_sandbox_is_refused(
    monkeypatch, tmp_path: Path
) -> None:
    old = tmp_path / "bwrap"
    old.write_text("#!/bin/sh\necho bubblewrap 0.4.1\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert "too old" in (sandbox.obstacle(Network.NONE) or "")


def test_where_there_are_no_user_namespaces_a_sandbox_is_refused(
    monkeypatch, tmp_path: Path
) -> None:
    barred = tmp_path / "bwrap"
    barred.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo bubblewrap 0.9.0 && exit\n"
        "echo bwrap: No permissions to create new namespace >&2\nexit 1\n"
    )
    barred.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(Unavailable, match="No permissions to create new namespace"):
        _sandbox(Options(guests="open"), hidden=tmp_path)


def test_off_is_no_sandbox_and_shares_nothing(tmp_path: Path) -> None:
    assert _sandbox(Options(guests="off"), hidden=tmp_path) is None
    with pytest.raises(UsageError, match="--share"):
        _sandbox(Options(guests="off", shares=(tmp_path,)), hidden=tmp_path)


def test_a_path_is_shared_only_if_it_is_really_below_a_share(tmp_path: Path) -> None:
    (tmp_path / "data" / "inside").mkdir(parents=True)
    (tmp_path / "data" / "state").mkdir()
    (tmp_path / "data" / "out").symlink_to(tmp_path)
    box = Sandbox(
        network=Network.NONE,
        disk_bytes=GIB,
        shares=(tmp_path / "data",),
        hidden=(tmp_path / "data" / "state",),
    )
    assert sandbox.shared(box, tmp_path / "data" / "inside")
    for other in ("data/out", "data/../x", "data/state", "data/state/ca"):
        assert not sandbox.shared(box, tmp_path / other), other


def test_what_a_guest_writes_on_its_page_does_not_steer_it(tmp_path: Path) -> None:
    words = guest_page(make_page(tmp_path / "page"), tmp_path / "page")
    words[Word.END_AT], words[Word.LEASE_UNTIL] = 5, 6
    guests = make_page(tmp_path / "other")
    with (tmp_path / GUEST_PAGE).open("r+b") as file:
        shown = file.read(PAGE_BYTES)
        assert int.from_bytes(shown[16:24], sys.byteorder) == 5, "it sees its deadline"
        guests[Word.END_AT], guests[Word.STEP] = 0, 9
        file.seek(0)
        file.write(guests.cast("B"))
    assert (words[Word.END_AT], words[Word.LEASE_UNTIL], words[Word.STEP]) == (5, 6, 9)
    found = open_page(tmp_path / "page")
    assert isinstance(found, TwoPages), "and so it is for the next agent"
    assert (found[Word.END_AT], found[Word.STEP]) == (5, 9)


def test_a_guest_that_cuts_its_page_short_harms_nobody(tmp_path: Path) -> None:
    words = guest_page(make_page(tmp_path / "page"), tmp_path / "page")
    os.truncate(tmp_path / GUEST_PAGE, 0)
    assert words[Word.STEP] == 0
    words[Word.END_AT] = 7
    assert words[Word.END_AT] == 7


def test_the_vault_saves_no_file_that_a_link_leads_to(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (tmp_path / "secret").write_text("secret")
    (own / "link").symlink_to(tmp_path / "secret")
    (own / "file").write_text("fine")
    with Vault(tmp_path / "vault", quota_bytes=MIB) as vault:

        def save(name: str) -> None:
            source = Source(name=name, path=own / name, below=own.resolve())
            vault.save(JobId("j"), epoch=1, step=1, saving=Saving.SDK, taken_at=0, parts=[source])

        save("file")
        with pytest.raises(UsageError, match="leads out"):
            save("link")
