"""What is restored is what was saved, to the last bit; anything else is refused."""

import json
import math
import random
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reclaimnet.errors import Damaged, UsageError
from reclaimnet.sdk import image

SOURCE = Path(__file__).parents[2] / "src"

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**20000), max_value=2**20000)
    | st.floats(allow_nan=True)
    | st.complex_numbers(allow_nan=True)
    | st.text(st.characters())
    | st.binary(max_size=3000)
)
KEYS = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(st.just("!") | st.text(max_size=1), inner, max_size=2)
    ),
    max_leaves=12,
)


def write(state, directory, layout=None):
    packed = image.pack(state, layout or image.Layout())
    buffer = image.map_image(directory, packed.size)
    image.write(packed, directory, buffer)
    if buffer is not None:
        buffer.close()


def round_trip(state, directory):
    write(state, directory)
    return image.load(directory)[0]


def same(a, b):
    """Equal in type and bits: nan equals nan, 1 is not True, and -0.0 is not 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(
            same(x, y) for x, y in zip(a.values(), b.values(), strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same([a.real, a.imag], [b.real, b.imag])
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b


@given(state=TREES)
def test_any_tree_of_plain_values_comes_back(state, tmp_path_factory):
    assert same(round_trip(state, tmp_path_factory.mktemp("image")), state)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(10, dtype=np.float32),
        np.array(3.5),
        np.zeros((0, 3)),
        np.array([True, False]),
        np.array([1 + 2j, math.nan]),
        np.array(["a", "läng"]),
        np.array([b"x", b"yz"]),
        np.array(["2026-01-01", "NaT"], dtype="datetime64[s]"),
        np.arange(6, dtype=">i8"),
        np.arange(24).reshape(2, 3, 4)[:, ::2, ::-1],
        np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8", (1,))]),
        np.array([((1, 2), 3)], dtype=[("n", [("x", "u1"), ("y", "u1")]), ("m", "i2")]),
        np.broadcast_to(np.float16(2), (3, 3)),
        np.float32(1.1),
        np.int64(-5),
        np.bool_(True),
        np.str_("text"),
        np.datetime64("2026-01-01"),
    ],
    ids=repr,
)
def test_any_array_comes_back_and_can_be_written_to(array, tmp_path):
    back = round_trip({"it": array}, tmp_path)["it"]
    assert same(back, array)
    if isinstance(back, np.ndarray):
        assert back.flags.writeable


def test_the_order_of_axes_in_memory_comes_back(tmp_path):
    original = np.random.default_rng(1).normal(size=(5, 6, 7)).transpose(2, 0, 1)
    back = round_trip(original, tmp_path)
    assert back.strides == original.strides
    fortran = round_trip(np.asfortranarray(np.ones((4, 5))), tmp_path)
    assert fortran.flags.f_contiguous
    assert not fortran.flags.c_contiguous


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "Philox", "SFC64", "MT19937"])
def test_random_generators_go_on_where_they_were(kind, tmp_path):
    rng = np.random.Generator(getattr(np.random, kind)(5))
    plain = random.Random(5)
    rng.integers(10, size=3, dtype=np.uint32)
    plain.gauss(0, 1)
    state = round_trip([rng.bit_generator.state, plain.getstate()], tmp_path)
    twin, other = np.random.Generator(getattr(np.random, kind)()), random.Random()
    twin.bit_generator.state = state[0]
    other.setstate(state[1])
    assert (twin.normal(size=100) == rng.normal(size=100)).all()
    assert [other.gauss(0, 1) for _ in range(9)] == [plain.gauss(0, 1) for _ in range(9)]


def test_what_did_not_change_keeps_its_bytes_at_its_place(tmp_path):
    layout = image.Layout()
    state = {"step": 9, "a": np.arange(1000.0), "b": np.ones(77), "c": np.arange(500)}
    write(state, tmp_path, layout)
    first = (tmp_path / "image").read_bytes()
    state |= {"step": 10**30, "new": np.ones(5), "b": np.ones(50), "log": ["something"] * 100}
    write(dict(reversed(state.items())), tmp_path, layout)
    assert (tmp_path / "image").read_bytes()[: len(first)] == first


def differences(before: bytes, after: bytes, block: int = 512) -> list[tuple[int, int]]:
    return [
        (start, block)
        for start in range(0, len(after), block)
        if before[start : start + block] != after[start : start + block]
    ]


def test_of_a_state_read_ahead_only_what_changed_is_read_again(tmp_path):
    layout = image.Layout()
    state = {"step": 1, "a": np.arange(5000.0), "b": np.ones((70, 90), order="F"), "c": b"x" * 4000}
    write(state, tmp_path, layout)
    before = (tmp_path / "image").read_bytes()
    ahead = image.load_ahead(tmp_path)
    assert ahead.size == layout.end
    arrays = {id(array) for _, array in ahead.arrays.values()}
    state["a"][100:700] += 1
    state["b"][3] = 7
    state |= {"step": 2, "c": b"y" * 4000}
    write(state, tmp_path, layout)
    changed = differences(before, (tmp_path / "image").read_bytes())
    restored, again = image.load(tmp_path, ahead, changed)
    assert same(restored, state)
    assert id(restored["a"].base if restored["a"].base is not None else restored["a"]) in arrays
    write(restored, tmp_path / "next", again)
    assert same(image.load(tmp_path / "next")[0], state)


def test_a_state_that_took_another_shape_is_read_anew(tmp_path):
    layout = image.Layout()
    write({"a": np.arange(1000.0), "b": np.arange(100)}, tmp_path, layout)
    ahead = image.load_ahead(tmp_path)
    state = {"a": np.arange(1000.0, dtype="f4"), "b": np.arange(400), "new": np.ones(9)}
    before = (tmp_path / "image").read_bytes()
    write(state, tmp_path, layout)
    changed = differences(before, (tmp_path / "image").read_bytes())
    assert same(image.load(tmp_path, ahead, changed)[0], state)


def test_a_state_that_keeps_growing_does_not_pile_up_its_past(tmp_path):
    layout = image.Layout()
    for n in range(1, 200):
        state = {"fixed": np.ones(1000), "grows": np.arange(n * 1000)}
        write(state, tmp_path, layout)
        assert layout.end <= 2 * (n + 1) * 8000 + image.SLACK
        assert same(image.load(tmp_path)[0], state)


def test_the_layout_outlives_a_restart(tmp_path):
    layout = image.Layout()
    write({"a": np.ones(10), "b": np.ones(10)}, tmp_path / "1", layout)
    state = {"b": np.ones(10), "c": b"x" * 5000, "a": np.ones(10)}
    write(state, tmp_path / "2", layout)
    restored, again = image.load(tmp_path / "2")
    write(restored, tmp_path / "3", again)
    for part in ("header", "image"):
        assert (tmp_path / "2" / part).read_bytes() == (tmp_path / "3" / part).read_bytes()


class Custom:
    pass


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"model": {"layers": [1, Custom()]}}, r"state\['model'\]\['layers'\]\[1\] is a .*Custom"),
        ({"a": np.array([None])}, r"state\['a'\] holds Python objects"),
        ({1, 2}, "state is a builtins.set"),
        ({"a": lambda: 1}, "function"),
        (np.ma.masked_array([1]), "MaskedArray"),
        ({"a": {Custom: 1}}, r"keys\(\)\[0\]"),
    ],
)
def test_what_cannot_be_saved_is_named(state, where):
    with pytest.raises(UsageError, match=where):
        image.pack(state, image.Layout())


def test_a_damaged_checkpoint_is_refused(tmp_path):
    write({"a": np.arange(100), "b": [1, 2]}, tmp_path)
    header, data = (tmp_path / "header").read_bytes(), (tmp_path / "image").read_bytes()
    for i in range(0, len(header), 7):
        broken = bytearray(header)
        broken[i] ^= 0x20
        (tmp_path / "header").write_bytes(broken)
        with pytest.raises(Damaged):
            image.load(tmp_path)
    for size in (0, 5, 23, len(header) - 1):
        (tmp_path / "header").write_bytes(header[:size])
        with pytest.raises(Damaged):
            image.load(tmp_path)
    (tmp_path / "header").write_bytes(header)
    (tmp_path / "image").write_bytes(data[:-1])
    with pytest.raises(Damaged, match="of"):
        image.load(tmp_path)
    (tmp_path / "image").unlink()
    with pytest.raises(Damaged):
        image.load(tmp_path)
    (tmp_path / "image").write_bytes(data)
    assert image.load(tmp_path)[0]["b"] == [1, 2]


def test_a_header_of_a_stranger_is_refused_without_running_anything(tmp_path):
    (tmp_path / "image").write_bytes(b"")
    for tree in (
        {"!": "object", "class": "os.system"},
        {"!": "array", "dtype": "O", "shape": [2], "at": 0, "room": 0},
        {"!": "array", "dtype": "f8", "shape": [2], "at": 0, "room": 0},
        {"!": "tuple"},
        {"!": "array", "dtype": "f8", "shape": [1 << 60], "at": 0, "room": 0},
        {"!": "array", "dtype": "f8", "shape": [-1], "at": 0, "room": 0},
    ):
        text = json.dumps({"size": 0, "tree": tree}).encode()
        prefix = image._PREFIX.pack(image.MAGIC, len(text), image.zlib.crc32(text))
        (tmp_path / "header").write_bytes(prefix + text)
        with pytest.raises(Damaged):
            image.load(tmp_path)


def test_the_sdk_needs_the_standard_library_only(tmp_path):
    code = (
        "import sys; from reclaimnet import sdk\n"
        "with sdk.job(local='kept', every=1) as job:\n"
        "    state = job.restore({'n': 0, 'b': b'x' * 9000})\n"
        "    job.step(state['n'] + 1, {'n': state['n'] + 1, 'b': state['b']})\n"
        "    print(state['n'], 'numpy' in sys.modules)\n"
    )
    for n in range(2):
        done = subprocess.run(
            [sys.executable, "-S", "-c", code],
            env={"PYTHONPATH": str(SOURCE)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == f"{n} False\n"
