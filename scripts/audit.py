#!/usr/bin/env python3
"""What ReclaimNet stands on: that all of it is pinned, may be used, and is not known to be broken.

    python scripts/audit.py                      this environment, against constraints.txt
    python scripts/audit.py --sbom sbom.json     the same as a bill of materials (CycloneDX 1.5)
    python scripts/audit.py --files              every installed file against the hash it came with
    python scripts/audit.py --advisories PLACE   against advisories in OSV's format, a file for each

It asks no service: whoever has the network fetches the advisories and says where they are. Two that
give away all of them: OSV's archive of PyPI (`all.zip`, read as it is), and a clone of PyPA's
advisory-database (its folder `vulns`, in YAML). Without that it says so, and checks the rest.
"""

import argparse
import base64
import csv
import hashlib
import importlib.metadata
import json
import re
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

try:
    import yaml
except ImportError:
    yaml = None

HERE = Path(__file__).resolve().parents[1]
OURS = "reclaimnet"
INSTALLER = frozenset({"pip", "setuptools", "wheel"})
"""Comes with Python itself, and installs the rest."""
BROUGHT = ("cuda-", "nvidia-cu", "nvidia-nccl", "nvidia-nv", "triton")
"""How the names begin of what torch brings along for GPUs, other things on other machines; it is
torch's own pin that holds them, and their makers' terms."""
ALLOWED = (
    "0BSD", "Apache-2.0", "Apache Software License", "BSD", "BSD License", "BSD-2-Clause",
    "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "ISC", "LLVM-exception", "MIT", "MIT License", "MIT-0",
    "MIT-CMU", "MPL-2.0", "Mozilla Public License 2.0 (MPL 2.0)", "PSF-2.0",
    "Python Software Foundation License", "Unlicense", "Zlib",
)  # fmt: skip
"""What may be used beside Apache-2.0 without giving our own users other terms."""
ADVISORY_KINDS = (".json", ".yaml")
READ_BY_US = {"atheris": "Apache-2.0"}
"""Of those whose metadata say nothing: what the licence says that they bring along."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One distribution."""

    name: str
    version: str
    licence: str = ""
    needs: tuple[str, ...] = ()
    """Names of what it needs here."""


def pins(text: str) -> dict[str, str]:
    """Name and version of every line; raises ValueError for a line that pins nothing."""
    found: dict[str, str] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9._+!-]+)", line)
        if match is None:
            raise ValueError(f"constraints.txt, line {number}: {line!r} pins no version")
        name = canonicalize_name(match[1])
        if name in found:
            raise ValueError(f"constraints.txt, line {number}: {name} is there twice")
        found[name] = match[2]
    return found


def installed() -> list[Part]:
    """Everything beside us in this environment."""
    parts = []
    for each in importlib.metadata.distributions():
        name = canonicalize_name(each.metadata["Name"])
        if name != OURS:
            needs = tuple(sorted(set(_needs(each.requires or ()))))
            terms = licence(each.metadata) or READ_BY_US.get(name, "")
            parts.append(Part(name=name, version=each.version, licence=terms, needs=needs))
    return sorted({part.name: part for part in parts}.values(), key=lambda part: part.name)


def _needs(requirements: Iterable[str]) -> Iterator[str]:
    here = {**default_environment(), "extra": ""}
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(here):
            yield canonicalize_name(requirement.name)


def licence(metadata: Any) -> str:
    """As its authors say it: an expression, else classifiers, else the first line of a text."""
    if expression := metadata.get("License-Expression"):
        return str(expression)
    classifiers = [
        text.rpartition("::")[2].strip()
        for text in metadata.get_all("Classifier") or ()
        if text.startswith("License ::")
    ]
    if classifiers:
        return " OR ".join(classifiers)
    return (metadata.get("License") or "").strip().partition("\n")[0]


def may_be_used(expression: str) -> bool:
    """By an SPDX expression without parentheses inside parentheses, or a classifier's words."""
    if expression in ALLOWED:
        return True
    choices = re.split(r"\s+OR\s+", expression.replace("(", "").replace(")", ""))
    return any(
        all(term.strip() in ALLOWED for term in re.split(r"\s+(?:AND|WITH)\s+", choice))
        for choice in choices
    )


def asked_for(pyproject: str) -> Iterator[str]:
    """What our own pyproject.toml names, for use and for building."""
    table = tomllib.loads(pyproject)
    project = table["project"]
    extras = project.get("optional-dependencies", {}).values()
    for text in (*project["dependencies"], *(t for extra in extras for t in extra)):
        yield canonicalize_name(Requirement(text).name)
    for text in table["build-system"]["requires"]:
        yield canonicalize_name(Requirement(text).name)


def problems(parts: list[Part], pinned: Mapping[str, str], pyproject: str) -> list[str]:
    told = []
    for part in parts:
        if part.name in INSTALLER or part.name.startswith(BROUGHT):
            continue
        pin = pinned.get(part.name)
        if pin is None:
            told.append(f"{part.name} {part.version} is installed and not pinned")
        elif Version(pin) not in (Version(part.version), Version(Version(part.version).public)):
            # A local label such as +cpu is another build of the same release.
            told.append(f"{part.name} is installed as {part.version} and pinned as {pin}")
        if not may_be_used(part.licence):
            told.append(f"{part.name} says its licence is {part.licence!r}; look at it")
        told += [
            f"{part.name} needs {need}, which is not pinned"
            for need in part.needs
            if need not in pinned and need not in INSTALLER and not need.startswith(BROUGHT)
        ]
    told += [
        f"pyproject.toml asks for {name}, which is not pinned"
        for name in sorted(set(asked_for(pyproject)))
        if name not in pinned and name not in INSTALLER
    ]
    return told


# --- advisories ------------------------------------------------------------------------------


def affected(version: str, advisory: Mapping[str, Any], name: str) -> bool:
    """Whether an advisory in OSV's format is about this version of the package."""
    for each in advisory.get("affected", ()):
        package = each.get("package", {})
        if package.get("ecosystem") != "PyPI" or canonicalize_name(package["name"]) != name:
            continue
        if version in each.get("versions", ()):
            return True
        for span in each.get("ranges", ()):
            if span.get("type") == "ECOSYSTEM" and _within(Version(version), span["events"]):
                return True
    return False


def _within(version: Version, events: Iterable[Mapping[str, str]]) -> bool:
    inside = False
    for event in sorted(events, key=_when):
        if "introduced" in event and version >= _version(event["introduced"]):
            inside = True
        if "fixed" in event and version >= _version(event["fixed"]):
            inside = False
        if "last_affected" in event and version > _version(event["last_affected"]):
            inside = False
    return inside


def _when(event: Mapping[str, str]) -> tuple[Version, bool]:
    (kind, text), *_ = event.items()
    return _version(text), kind != "introduced"


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


def advisory_files(place: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of each, in a folder and all below it or in an archive."""
    if place.is_dir():
        for file in sorted(place.rglob("*")):
            if file.suffix in ADVISORY_KINDS and file.is_file():
                yield file.name, file.read_bytes()
        return
    try:
        with zipfile.ZipFile(place) as archive:
            for each in sorted(archive.namelist()):
                if Path(each).suffix in ADVISORY_KINDS:
                    yield each, archive.read(each)
    except (OSError, zipfile.BadZipFile) as error:
        raise SystemExit(f"{place} is neither a folder nor an archive: {error}") from error


def read_advisory(name: str, content: bytes) -> dict[str, Any]:
    """In JSON, or in YAML where PyYAML is there, as it is beside `reclaimnet[kube]`."""
    if name.endswith(".json"):
        found: dict[str, Any] = json.loads(content)
        return found
    if yaml is None:
        raise SystemExit("advisories in YAML need PyYAML; install it, or fetch OSV's archive")
    return yaml.load(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}


def advisories(place: Path, pinned: Mapping[str, str]) -> tuple[int, list[str]]:
    """How many were read, and which of them are about what we pin."""
    told = []
    count = 0
    for file, content in advisory_files(place):
        advisory = read_advisory(file, content)
        if advisory.get("withdrawn"):
            continue
        count += 1
        names = {
            canonicalize_name(each["package"]["name"])
            for each in advisory.get("affected", ())
            if each.get("package", {}).get("ecosystem") == "PyPI"
        }
        told += [
            f"{name} {pinned[name]}: {advisory['id']} {advisory.get('summary', '')}".strip()
            for name in sorted(names & pinned.keys())
            if affected(pinned[name], advisory, name)
        ]
    return count, told


# --- files -----------------------------------------------------------------------------------


def changed_files() -> list[str]:
    """Installed files that are not what their distribution brought."""
    told = []
    for each in importlib.metadata.distributions():
        name = canonicalize_name(each.metadata["Name"])
        for path, sealed, *_ in csv.reader((each.read_text("RECORD") or "").splitlines()):
            algorithm, _, digest = sealed.partition("=")
            if algorithm != "sha256":
                continue
            file = Path(str(each.locate_file(path)))
            if not file.exists():
                told.append(f"{name}: {path} is gone")
                continue
            found = hashlib.sha256(file.read_bytes()).digest()
            if base64.urlsafe_b64encode(found).rstrip(b"=").decode() != digest:
                told.append(f"{name}: {path} has been changed")
    return told


# --- the bill --------------------------------------------------------------------------------


def bill(parts: list[Part], version: str) -> dict[str, Any]:
    """CycloneDX 1.5: what it is made of, under which terms, and what needs what."""
    refs = {part.name: f"pkg:pypi/{part.name}@{part.version}" for part in parts}
    us = f"pkg:pypi/{OURS}@{version}"
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {"type": "application", "name": OURS, "version": version, "bom-ref": us}
        },
        "components": [
            {
                "type": "library",
                "name": part.name,
                "version": part.version,
                "purl": refs[part.name],
                "bom-ref": refs[part.name],
                "licenses": [{"license": {"name": part.licence}}] if part.licence else [],
            }
            for part in parts
        ],
        "dependencies": [
            {
                "ref": refs[part.name],
                "dependsOn": [refs[need] for need in part.needs if need in refs],
            }
            for part in parts
        ],
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sbom", type=Path, help="where to write the bill of materials")
    parser.add_argument("--advisories", type=Path, help="a folder or archive in OSV's format")
    parser.add_argument("--files", action="store_true", help="look at every installed file")
    asked = parser.parse_args(argv)
    pyproject = (HERE / "pyproject.toml").read_text()
    pinned = pins((HERE / "constraints.txt").read_text())
    parts = installed()
    told = problems(parts, pinned, pyproject)
    if asked.files:
        told += changed_files()
    known = "no advisories were looked at (fetch some, and say where: --advisories PLACE)"
    if asked.advisories is not None:
        count, found = advisories(asked.advisories, pinned)
        if not count:
            raise SystemExit(f"there are no advisories in {asked.advisories}")
        known = f"{count} advisories were looked at"
        told += found
    if asked.sbom is not None:
        version = tomllib.loads(pyproject)["project"]["version"]
        asked.sbom.write_text(json.dumps(bill(parts, version), indent=1) + "\n")
    for line in told:
        print(line, file=sys.stderr)
    print(f"{len(parts)} distributions, {len(pinned)} pins, {len(told)} problems; {known}")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
