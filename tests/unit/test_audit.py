"""What we stand on is pinned, may be used, and is compared with what is known to be broken."""

import importlib.util
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("audit", ROOT / "scripts" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


audit = _load()
PROJECT = """
[build-system]
requires = ["builder"]
[project]
dependencies = ["a>=1"]
"""


def part(name: str, version: str = "1.0", licence: str = "MIT", *needs: str) -> Any:
    return audit.Part(name=name, version=version, licence=licence, needs=needs)


def test_all_that_is_installed_here_is_pinned_and_may_be_used() -> None:
    pinned = audit.pins((ROOT / "constraints.txt").read_text())
    told = audit.problems(audit.installed(), pinned, (ROOT / "pyproject.toml").read_text())
    assert told == []


def test_what_is_not_pinned_or_otherwise_is_told() -> None:
    pinned = {"a": "1.0", "b": "2.0", "builder": "1"}
    assert audit.problems([part("a"), part("b", "2")], pinned, PROJECT) == []
    told = audit.problems(
        [part("a", "1.1"), part("c"), part("b", "2.0", "MIT", "d")], pinned, PROJECT
    )
    assert told == [
        "a is installed as 1.1 and pinned as 1.0",
        "c 1.0 is installed and not pinned",
        "b needs d, which is not pinned",
    ]
    del pinned["builder"]
    assert "asks for builder" in audit.problems([], pinned, PROJECT)[0]


@pytest.mark.parametrize("line", ["a>=1", "a", "a==1.*", "a @ https://x", "-e .", "a==1\nA==1"])
def test_a_line_that_pins_nothing_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="line"):
        audit.pins(line)


@pytest.mark.parametrize(
    ("licence", "allowed"),
    [
        ("MIT", True),
        ("GPL-2.0-or-later OR Apache-2.0", True),
        ("BSD-2-Clause AND Apache-2.0 WITH LLVM-exception", True),
        ("GPL-3.0-only", False),
        ("MIT AND GPL-3.0-only", False),
        ("", False),
    ],
)
def test_licences(licence: str, allowed: bool) -> None:
    assert audit.may_be_used(licence) is allowed


def advisory(**of: Any) -> dict[str, Any]:
    return {
        "id": "PYSEC-0",
        "summary": "holes",
        "affected": [{"package": {"ecosystem": "PyPI", "name": "A"}, **of}],
    }


@pytest.mark.parametrize(
    ("version", "hit"),
    [("0.9", False), ("1.0", True), ("1.4.9", True), ("1.5", False), ("2.1", True)],
)
def test_an_advisory_is_about_some_versions(version: str, hit: bool) -> None:
    events = [{"introduced": "1.0"}, {"fixed": "1.5"}, {"introduced": "2.0"}]
    ranges = [{"type": "ECOSYSTEM", "events": events}]
    assert audit.affected(version, advisory(ranges=ranges), "a") is hit
    assert not audit.affected(version, advisory(ranges=ranges), "b")


def test_advisories_in_a_folder_are_compared_with_the_pins(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(advisory(versions=["1.0"])))
    (tmp_path / "two.json").write_text(json.dumps(advisory(versions=["0.1"])))
    gone = {**advisory(versions=["1.0"]), "withdrawn": "2026-01-01T00:00:00Z"}
    (tmp_path / "three.json").write_text(json.dumps(gone))
    assert audit.advisories(tmp_path, {"a": "1.0"}) == (2, ["a 1.0: PYSEC-0 holes"])


def test_the_script_tells_of_a_broken_pin_in_whatever_form_advisories_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an operator runs it, with files that were fetched elsewhere."""
    monkeypatch.setattr(audit, "installed", list)
    yaml = pytest.importorskip("yaml")
    pinned = audit.pins((ROOT / "constraints.txt").read_text())
    name = "cryptography"
    made_up = advisory(versions=[pinned[name]])
    made_up["affected"][0]["package"]["name"] = name
    folder, archive = tmp_path / "vulns" / name, tmp_path / "all.zip"
    folder.mkdir(parents=True)
    (folder / "PYSEC-0.yaml").write_text(yaml.safe_dump(made_up))
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("PYSEC-0.json", json.dumps(made_up))
    for place in (tmp_path / "vulns", archive):
        assert audit.main(["--advisories", str(place)]) == 1
        told = capsys.readouterr()
        assert told.err == f"{name} {pinned[name]}: PYSEC-0 holes\n"
        assert "1 advisories were looked at" in told.out


def test_advisories_that_are_none_are_not_taken_for_good_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "installed", list)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for place in ("empty", "file", "missing"):
        with pytest.raises(SystemExit, match=place):
            audit.main(["--advisories", str(tmp_path / place)])


def test_the_bill_names_every_part_and_what_needs_what() -> None:
    made = audit.bill([part("a", "1.0", "MIT", "b"), part("b")], "9")
    assert [each["purl"] for each in made["components"]] == ["pkg:pypi/a@1.0", "pkg:pypi/b@1.0"]
    assert made["dependencies"][0] == {"ref": "pkg:pypi/a@1.0", "dependsOn": ["pkg:pypi/b@1.0"]}
    assert made["metadata"]["component"]["version"] == "9"
