"""Whatever the bytes are, they come back as they were, or not at all."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaimnet.adapters.vault.delta import Codec
from reclaimnet.adapters.vault.manifests import CHUNK_BYTES, manifest_id, parse_manifest
from reclaimnet.adapters.vault.pace import Pace
from reclaimnet.adapters.vault.store import Source, Vault
from reclaimnet.errors import Damaged
from reclaimnet.model.market import JobId
from reclaimnet.model.units import GIB
from reclaimnet.model.work import Saving

codec = Codec()
some_bytes = st.binary(max_size=2000)


@given(data=some_bytes, base=some_bytes)
def test_a_delta_gives_back_the_exact_bytes(data: bytes, base: bytes) -> None:
    assert codec.decode(codec.encode(data, base), base, size=len(data)) == data


@given(data=st.binary(min_size=1, max_size=300), flips=st.binary(min_size=1, max_size=300))
def test_a_small_change_makes_a_small_delta(data: bytes, flips: bytes) -> None:
    base = data * (CHUNK_BYTES // len(data))
    changed = bytearray(base)
    changed[: len(flips)] = flips
    delta = codec.encode(changed, base)
    assert len(delta) < 2000
    assert codec.decode(delta, base, size=len(base)) == changed


@given(delta=some_bytes, base=some_bytes, size=st.integers(0, 2 * CHUNK_BYTES))
def test_garbage_is_no_delta(delta: bytes, base: bytes, size: int) -> None:
    try:
        data = codec.decode(delta, base, size=size)
    except Damaged:
        return
    assert len(data) == size


@given(data=some_bytes, size=st.integers(0, 4000))
def test_a_delta_never_unpacks_to_more_than_it_should(data: bytes, size: int) -> None:
    if size != len(data):
        with pytest.raises(Damaged):
            codec.decode(codec.encode(data, b""), b"", size=size)


names = st.text(st.characters(blacklist_characters="/\0", codec="utf-8"), min_size=1, max_size=20)
paths = st.lists(names.filter(lambda name: name not in (".", "..")), min_size=1, max_size=3)
contents = st.one_of(
    st.binary(max_size=100),
    st.builds(
        lambda word, extra: (word * CHUNK_BYTES)[: CHUNK_BYTES + extra],
        st.binary(min_size=1, max_size=3),
        st.integers(-2, 2),
    ),
)


@settings(max_examples=30, deadline=None)
@given(
    first=st.dictionaries(paths.map("/".join), contents, max_size=4),
    second=st.dictionaries(paths.map("/".join), contents, max_size=4),
    keep=st.booleans(),
)
def test_any_files_come_back_alone_and_on_a_base(
    first: dict[str, bytes], second: dict[str, bytes], keep: bool
) -> None:
    second = {**first, **second} if keep else second
    first, second = without_clashes(first), without_clashes(second)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Vault(folder / "vault", quota_bytes=GIB) as vault:
            saved = [
                vault.save(
                    JobId("job"),
                    epoch=1,
                    step=step,
                    saving=Saving.SIGNAL,
                    taken_at=step,
                    parts=written(folder / str(step), files),
                ).manifest
                for step, files in enumerate((first, second))
            ]
            vault.assemble(saved[0], folder / "grown")
            assert files_below(folder / "grown") == first
            if not clash(first, second):
                vault.assemble(saved[1], folder / "grown", base=saved[0])
                assert files_below(folder / "grown") == second
            vault.assemble(saved[1], folder / "fresh")
            assert files_below(folder / "fresh") == second
            for identity in saved:
                assert vault.missing(vault.manifest(identity)) == []
            vault.forget(JobId("job"))
            assert vault.usage().used_bytes == 0


def without_clashes(files: dict[str, bytes]) -> dict[str, bytes]:
    """A name cannot be a file and a folder."""
    return {name: data for name, data in files.items() if not clash({name: b""}, files)}


def clash(one: dict[str, bytes], two: dict[str, bytes]) -> bool:
    return any(a.startswith(b + "/") or b.startswith(a + "/") for a in one for b in two)


def written(folder: Path, files: dict[str, bytes]) -> list[Source]:
    folder.mkdir()
    sources = []
    for number, (name, data) in enumerate(files.items()):
        path = folder / str(number)
        path.write_bytes(data)
        sources.append(Source(name=name, path=path))
    return sources


def files_below(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@given(data=st.binary(max_size=500))
def test_random_bytes_are_no_manifest(data: bytes) -> None:
    with pytest.raises(Damaged):
        parse_manifest(data, manifest_id(data))


@given(
    rates=st.lists(st.one_of(st.none(), st.integers(1, 1 << 40)), min_size=1, max_size=8),
    sizes=st.lists(st.integers(0, 1 << 20), max_size=8),
)
def test_a_pace_never_blocks_who_was_stopped(rates: list[int | None], sizes: list[int]) -> None:
    pace = Pace(1)
    for rate in rates:
        pace.change(rate)
        for size in sizes:
            pace.spend(size, lambda: True)
    assert pace.rate == rates[-1]
