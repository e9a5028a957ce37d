"""`rn testbed`: a campus of network namespaces from a file, and every trace of it removed."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Final

from reclaimnet.adapters.linux import testbed
from reclaimnet.adapters.linux.testbed import Campus, Rack, Testbed
from reclaimnet.errors import BadConfig, NotFound

DEFAULT_MARK: Final = "campus"

_RATE_UNITS: Final = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}
_TOP_KEYS: Final = frozenset({"mark", "network", "lanes", "lower_effort", "management", "rack"})
_RACK_KEYS: Final = frozenset({"name", "hosts", "uplink", "host_rate"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TestbedConfig:
    __test__ = False

    mark: str
    campus: Campus


def up(config: TestbedConfig) -> Testbed:
    """Build it; nothing is touched if it cannot be built here."""
    return testbed.up(config.campus, config.mark)


def down(mark: str | None = None) -> int:
    """Remove the testbed with this mark, or all of them; the number of namespaces removed."""
    return sum(testbed.down(one) for one in ([mark] if mark is not None else testbed.marks()))


def read_config(path: Path) -> TestbedConfig:
    """Read a campus file; BadConfig says in one sentence what is wrong with it."""
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise NotFound(f"There is no testbed file {path}.") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadConfig(f"{path} cannot be read: {error}.") from error
    try:
        return parse_config(table)
    except BadConfig as error:
        raise BadConfig(f"{path}: {error}") from error


def parse_config(table: Mapping[str, Any]) -> TestbedConfig:
    _refuse_unknown(table, _TOP_KEYS, "the file")
    racks = table.get("rack", [])
    if not isinstance(racks, list) or not all(isinstance(rack, dict) for rack in racks):
        raise BadConfig("Racks are written as [[rack]] tables.")
    try:
        network = IPv4Network(str(table.get("network", testbed.DEFAULT_NETWORK)))
    except ValueError as error:
        raise BadConfig(f"{table['network']!r} is not a network: {error}.") from error
    defaults = Campus(racks=())
    campus = Campus(
        racks=tuple(_rack(rack) for rack in racks),
        network=network,
        lanes=_flag(table, "lanes", default=defaults.lanes),
        lower_effort=_flag(table, "lower_effort", default=defaults.lower_effort),
        management=_flag(table, "management", default=defaults.management),
    )
    mark = str(table.get("mark", DEFAULT_MARK))
    testbed.check(campus, mark)
    return TestbedConfig(mark=mark, campus=campus)


def parse_rate(text: str) -> int:
    """Bytes a second for "100mbit" or "1gbit"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]bit)(?:/s)?", text.strip().lower())
    if match is None:
        raise BadConfig(f"{text!r} is not a rate; write for example 100mbit or 1gbit.")
    return round(float(match[1]) * _RATE_UNITS[match[2]])


def _rack(table: Mapping[str, Any]) -> Rack:
    _refuse_unknown(table, _RACK_KEYS, "a rack")
    name, hosts = table.get("name"), table.get("hosts")
    if not isinstance(name, str) or type(hosts) is not int:
        raise BadConfig("Each rack needs a name and a number of hosts.")
    return Rack(
        name=name,
        hosts=hosts,
        uplink=parse_rate(str(table["uplink"])) if "uplink" in table else None,
        host_rate=parse_rate(str(table["host_rate"])) if "host_rate" in table else None,
    )


def _flag(table: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = table.get(key, default)
    if not isinstance(value, bool):
        raise BadConfig(f"{key} is either true or false.")
    return value


def _refuse_unknown(table: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise BadConfig(f"{where} has no key {unknown[0]!r}; it has {', '.join(sorted(known))}.")
