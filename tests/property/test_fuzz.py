"""Bad bytes at every door: a parser that faces the outside either understands what it is given or
says in a sentence of ours what is wrong. Nothing else ever comes out of it."""

import asyncio
import base64
import copy
import json
import tempfile
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from litestar.testing import TestClient

from reclaimnet import wire
from reclaimnet.adapters.slurm import words
from reclaimnet.adapters.tls import ca
from reclaimnet.adapters.vault.manifests import CHUNK_BYTES, manifest_id, parse_manifest
from reclaimnet.apps import backup, bundle, chain_job, config, gateway, guard_config, replay
from reclaimnet.apps import testbed as beds
from reclaimnet.apps.register import read_invitation
from reclaimnet.errors import BadConfig, Damaged, ReclaimNetError, Unavailable
from reclaimnet.model import events
from reclaimnet.model.market import Card, JobId, NodeId
from reclaimnet.model.work import JobRecord, JobSpec
from reclaimnet.policy.topology import parse_topology
from reclaimnet.sim.slurm.trace import parse_trace
from reclaimnet.sim.toml import read_scenario

FUZZ = settings(
    max_examples=40,
    derandomize=True,
    database=None,
    # What breaks a parser is small already; looking for something smaller takes minutes.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["", "0", "-1", "1e999", "nan", "../x", "\0", "9" * 30, "²", "1gbit", "5m"]),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)


def ours(parse: Callable[[], object]) -> None:
    """Understood, or refused in our own words."""
    said = "understood"
    try:
        parse()
    except ReclaimNetError as error:
        said = str(error)
    assert len(said) >= 10, "a sentence says what is wrong"


def _places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    inner: typing.Iterable[tuple[Any, object]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    for key, each in inner:
        found += _places(each, (*path, key))
    return found


@st.composite
def bent(draw: st.DrawFn, value: dict[str, Any]) -> dict[str, Any]:
    """A valid table with a few of its places changed, removed or added."""
    made = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        places = _places(made)
        if not places:
            break
        path = draw(st.sampled_from(places))
        parent: Any = made
        for key in path[:-1]:
            parent = parent[key]
        match draw(st.sampled_from(["change", "change", "remove", "add"])):
            case "remove":
                del parent[path[-1]]
            case "add" if isinstance(parent, dict):
                parent[draw(st.text(max_size=8))] = draw(ODD)
            case _:
                parent[path[-1]] = draw(ODD)
    return made


def toml(value: object, *, top: bool = True) -> str:
    """As TOML; what TOML has no word for is left out."""
    match value:
        case dict():
            rows = [
                f"{json.dumps(str(key))} = {toml(each, top=False)}"
                for key, each in value.items()
                if each is not None
            ]
            return "\n".join(rows) if top else "{" + ", ".join(rows) + "}"
        case list():
            return "[" + ", ".join(toml(v, top=False) for v in value if v is not None) + "]"
        case bool():
            return str(value).lower()
        case float() | int():
            return str(value)
        case _:
            return json.dumps(value)


# --- between nodes ---------------------------------------------------------------------------

RECORD = json.loads(
    wire.encode_record(
        JobRecord(
            id=JobId("j1"),
            spec=JobSpec(name="train", user="u", command=("python", "x.py"), gpus=1),
            submitted_at=1,
        )
    )
)
CARD = json.loads(wire.encode_card(Card(node=NodeId("n1"), beat=1, gpus=(), vacant=())))
MANIFEST = {
    "job": "j1",
    "epoch": 1,
    "step": 7,
    "taken_at": 5,
    "saving": "sdk",
    "chunk_bytes": CHUNK_BYTES,
    "parts": [{"name": "state", "size": 3, "mode": 420, "chunks": ["ab" * 32]}],
}
TOLD = [kind.__name__ for kind in typing.get_args(events.Told)]


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
        ),
        max_leaves=8,
    )


JSON = nested(ODD)
SOUND = nested(st.none() | st.booleans() | st.integers(-(1 << 40), 1 << 40) | st.text(max_size=8))


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()


@FUZZ
@given(bent(RECORD), bent(CARD), bent(MANIFEST))
def test_bent_records_cards_and_manifests(record: Any, card: Any, manifest: Any) -> None:
    ours(lambda: wire.decode_record(as_json(record)))
    ours(lambda: wire.decode_card(as_json(card)))
    data = as_json(manifest)
    ours(lambda: parse_manifest(data, manifest_id(data)))


@FUZZ
@given(st.dictionaries(st.text(max_size=8), JSON, max_size=5), st.sampled_from(TOLD), st.binary())
def test_what_others_tell(fields: dict[str, Any], kind: str, noise: bytes) -> None:
    ours(lambda: wire.decode_told(as_json({**fields, "kind": kind}), "n1"))
    ours(lambda: wire.decode_told(noise, "n1"))
    ours(lambda: wire.decode_request(as_json({**fields, "kind": "ReclaimRequest"})))
    ours(lambda: wire.decode_reply(as_json(fields)))
    ours(lambda: wire.order_from_dict({**fields, "kind": "Tell"}))


@FUZZ
@given(st.dictionaries(st.text(min_size=1, max_size=8), SOUND, max_size=4))
def test_what_a_newer_peer_adds_is_passed_over(more: dict[str, Any]) -> None:
    """Rolling upgrades: a newer agent's records, cards and requests have fields of which this one
    knows nothing."""
    added = {f"new_{key}": value for key, value in more.items()}
    for known, decode in ((RECORD, wire.decode_record), (CARD, wire.decode_card)):
        assert decode(as_json({**known, **added})) == decode(as_json(known))
    told = {"kind": "VacancyTold", "node": "n1", "vacant": 1, "at": 5}
    understood = wire.decode_told(as_json({**told, **added}), "n1")
    assert understood == wire.decode_told(as_json(told), "n1")


def test_what_an_older_peer_leaves_out_has_a_meaning() -> None:
    """Only what was there from the first version on may be needed."""
    record = {key: RECORD[key] for key in ("id", "spec", "submitted_at")}
    record["spec"] = {key: RECORD["spec"][key] for key in ("name", "user", "command")}
    assert wire.decode_record(as_json(record)).id == "j1"
    card = {key: CARD[key] for key in ("node", "beat", "gpus", "vacant")}
    assert wire.decode_card(as_json(card)).node == "n1"


@FUZZ
@given(st.text(), st.binary(max_size=60), bent({"url": "nats://x:1", "ca": "pem", "secret": "s"}))
def test_invitations(text: str, noise: bytes, table: Any) -> None:
    ours(lambda: read_invitation(text))
    for data in (noise, as_json(table)):
        packed = base64.urlsafe_b64encode(data).decode().rstrip("=")
        ours(lambda packed=packed: read_invitation(f"rn1.{packed}"))
    ours(lambda: read_invitation(f"rn1.{text}"))


@FUZZ
@given(st.binary(max_size=200))
def test_certificate_requests_and_bundles(noise: bytes) -> None:
    ours(lambda: ca.requested_name(noise))
    pem = b"-----BEGIN CERTIFICATE REQUEST-----\n" + base64.b64encode(noise)
    ours(lambda: ca.requested_name(pem + b"\n-----END CERTIFICATE REQUEST-----\n"))
    with tempfile.TemporaryDirectory() as folder:
        ours(lambda: bundle.unpack(noise, Path(folder) / "bundle"))
        (Path(folder) / "file").write_bytes(noise)
        place = config.load(env={"XDG_STATE_HOME": folder}, project=Path("no"), system=Path("no"))
        ours(lambda: backup.restore(place, Path(folder) / "file"))


# --- files -----------------------------------------------------------------------------------

SCENARIO = {
    "name": "s",
    "days": 1,
    "buildings": {"b": {"uplink": "1gbit"}},
    "nodes": [
        {"id": "n1", "gpus": 2, "uplink": "1gbit", "building": "b"},
        {"id": "n2", "gpus": 1, "uplink": "1gbit", "building": "b"},
    ],
    "happenings": [
        {"at": "0s", "node": "n1", "kind": "lend"},
        {"at": "5m", "node": "n1", "kind": "reclaim", "grace": "1m"},
    ],
    "jobs": [{"id": "j", "at": "1m", "gpus": 1, "hours": 1, "state": "1gb"}],
}
TOPOLOGY = {
    "core": {"rate": "10gbit"},
    "buildings": {"b": {"uplink": "1gbit"}},
    "nodes": {"n1": {"building": "b", "uplink": "1gbit", "nat": True}},
}
BED = {
    "mark": "m",
    "network": "10.9.0.0/16",
    "lanes": True,
    "management": False,
    "rack": [{"name": "a", "hosts": 2, "uplink": "1gbit", "host_rate": "1gbit"}],
}
GUARD = {
    "agent_uid": 1,
    "socket": "/s",
    "lease": "1s",
    "uplinks": ["eth0"],
    "terms": {"guests": 1, "rate": 10_000_000, "until": 5},
}
SETTINGS = {"gateway": {"url": "http://x", "token": "t"}, "state": "/s"}


def test_what_is_bent_was_sound() -> None:
    """Otherwise nothing but the first refusal would ever be tried."""
    read_scenario(toml(SCENARIO), file="f")
    parse_topology(toml(TOPOLOGY), file="f")
    beds.parse_config(BED)
    wire.decode_record(as_json(RECORD))
    wire.decode_card(as_json(CARD))
    parse_manifest(as_json(MANIFEST), manifest_id(as_json(MANIFEST)))


@pytest.mark.parametrize("days", ["inf", "nan", "1e999", "9" * 400, "-1"])
def test_a_scenario_has_an_end(days: str) -> None:
    text = toml(SCENARIO).replace('"days" = 1', f'"days" = {days}')
    with pytest.raises(BadConfig, match="days"):
        read_scenario(text, file="f")


@FUZZ
@given(bent(SCENARIO), bent(TOPOLOGY), bent(BED), st.text(max_size=80))
def test_scenarios_topologies_and_testbeds(scenario: Any, plan: Any, bed: Any, noise: str) -> None:
    for text in (toml(scenario), noise):
        ours(lambda text=text: read_scenario(text, file="f"))
    for text in (toml(plan), noise):
        ours(lambda text=text: parse_topology(text, file="f"))
    ours(lambda: beds.parse_config(bed))


@FUZZ
@given(bent(GUARD), bent(SETTINGS), bent(BED), st.binary(max_size=80))
def test_files_of_guards_testbeds_and_settings(
    guard: Any, known: Any, bed: Any, noise: bytes
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file.toml"
        for data in (toml(guard).encode(errors="replace"), noise):
            file.write_bytes(data)
            file.chmod(0o600)
            ours(lambda: guard_config.read_config(file))
        for data in (toml(known).encode(errors="replace"), noise):
            file.write_bytes(data)
            ours(lambda: config.load(env={"HOME": folder}, project=file, system=file))
        for data in (toml(bed).encode(errors="replace"), noise):
            file.write_bytes(data)
            ours(lambda: beds.read_config(file))


CELL = st.one_of(
    st.text(max_size=8),
    st.integers().map(str),
    st.sampled_from(["2024-01-01T00:00:00", "RUNNING", "1-00:00:00", "²", "None", "9" * 40]),
    st.sampled_from(["9" * 5000, "0:0", "Unknown", "CANCELLED by 1"]),
)


@FUZZ
@given(st.lists(st.lists(CELL, max_size=14), max_size=5), st.text(max_size=60))
def test_the_words_of_slurm(rows: list[list[str]], noise: str) -> None:
    for parse, fields in (
        (words.parse_squeue, words.SQUEUE_FIELDS),
        (words.parse_sacct, words.SACCT_FIELDS),
        (words.parse_sinfo, words.SINFO_FIELDS),
    ):
        lines = [(row + ["1"] * len(fields))[: len(fields)] for row in rows]
        ours(lambda p=parse, r=lines: p("\n".join(words.SEPARATOR.join(c) for c in r)))
        ours(lambda p=parse: p(noise))
    ours(lambda: chain_job.parse_slurm_time(noise))


HEADERS = (
    "JobID\tJobName\tUID\tStart\tSubmit\tEnd\tPriority\tTimelimitRaw\tExitCode\tNNodes",
    "JobID|User|Submit|Start|End|State|TimelimitRaw|NNodes|Partition",
    "; SWF",
)


@FUZZ
@given(st.lists(st.lists(CELL, max_size=18), max_size=5), st.text(max_size=60))
def test_traces_journals_and_scripts(rows: list[list[str]], noise: str) -> None:
    for header, joint in zip(HEADERS, ("\t", "|", " "), strict=True):
        width = header.count(joint) + 1 if joint != " " else 18
        lines = [joint.join((row + ["1"] * width)[:width]) for row in rows]
        ours(lambda h=header, r=lines: parse_trace([h, *r], name="f"))
    ours(lambda: parse_trace(noise.splitlines(), name="f"))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        file.write_text(f"#SBATCH {noise}\n", errors="replace")
        ours(lambda: chain_job.read_script(file))


ENTRY = {
    "at": 5,
    "node": "n1",
    "event": {"kind": "RecordChanged", "record": RECORD},
    "orders": [{"kind": "StoreRecord", "record": RECORD}],
}


@FUZZ
@given(bent(ENTRY), st.binary(max_size=80))
def test_journals_to_be_played(entry: Any, noise: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        for data in (as_json(entry), noise, b"[" * 100_000):
            file.write_bytes(data)
            ours(lambda: replay.record("f", replay.read_journal(file)))


# --- HTTP ------------------------------------------------------------------------------------


class SilentCampus:
    """Nobody is there: every question ends in one of our own errors."""

    is_up = True
    bad_messages = 0
    journal_dropped = 0

    def __init__(self) -> None:
        self.records = self.store = self

    async def _nothing(self, on_current: Callable[[], None] = lambda: None) -> Any:
        on_current()
        await asyncio.Event().wait()
        yield

    watch = watch_cards = _nothing

    def __getattr__(self, name: str) -> Any:
        async def fail(*_: object, **__: object) -> None:
            raise Unavailable(f"nobody can {name} here now")

        return fail


@pytest.fixture(scope="module")
def http() -> Any:
    app = gateway.build(SilentCampus(), "t" * 20)  # type: ignore[arg-type]
    with TestClient(app, raise_server_exceptions=False) as client:
        client.headers["Authorization"] = f"Bearer {'t' * 20}"
        yield client


SUBMISSION = {"name": "n", "user": "u", "command": ["python", "x.py"], "gpus": 1, "env": {"A": "1"}}
DOORS = (
    ("/api/v1/jobs", SUBMISSION),
    ("/api/v1/nodes/n1/lend", {"notice": 5, "gpus": ["0"]}),
    ("/api/v1/nodes/n1/reclaim", {"grace": 5, "gpus": ["0"], "reason": "r"}),
)


@FUZZ
@given(door=st.sampled_from(DOORS), data=st.data(), noise=st.binary(max_size=60))
def test_http_bodies(http: Any, door: tuple[str, Any], data: st.DataObject, noise: bytes) -> None:
    path, valid = door
    for body in (as_json(data.draw(bent(valid))), noise):
        answer = http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code != 500, answer.text
        if answer.status_code >= 400:
            assert answer.json()["detail"]


@FUZZ
@given(st.text(max_size=30), st.sampled_from(["jobs", "nodes", "bundles", "events", "x"]))
def test_http_paths(http: Any, name: str, kind: str) -> None:
    from urllib.parse import quote

    if kind != "events":
        assert http.get(f"/api/v1/{kind}/{quote(name)}").status_code != 500


@pytest.mark.parametrize("path", [path for path, _ in DOORS])
@pytest.mark.parametrize(
    "body", [b'{"reason":"\xe6("}', b"\xe6", b"[" * 100_000, b'{"a":' * 50_000]
)
def test_http_bodies_that_are_no_text_or_too_deep(http: Any, path: str, body: bytes) -> None:
    answer = http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("data", [b'{"holder":"\xe6("}', b"[" * 100_000, b"", b"1"])
def test_what_is_not_ours_is_damaged_whatever_the_decoder_calls_it(data: bytes) -> None:
    with pytest.raises(Damaged):
        wire.decode_json(data, dict[str, str])
