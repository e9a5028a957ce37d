"""The image of a job's state: a tree of plain values and arrays as two files, without pickle.

- `header`: 8 bytes of magic, then the length and the CRC-32 of the text that follows (two 64-bit
  words, little-endian), then the tree as JSON. What JSON cannot hold exactly is an object with
  the key "!", which names its kind.
- `image`: the arrays' bytes, each at an offset that is a multiple of ALIGN. An array that keeps
  its place in the tree and its size keeps its offset from save to save, so that what did not
  change in the state did not change in the file either.

The standard library is enough until an array appears.
"""

import base64
import ctypes
import importlib
import json
import math
import mmap
import os
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from reclaimnet.errors import Damaged, UsageError

HEADER: Final = "header"
IMAGE: Final = "image"
MAGIC: Final = b"RNSTATE1"
ALIGN: Final = 64
INLINE_BYTES: Final = 1024
"""Shorter byte strings are part of the header."""
SLACK: Final = 1 << 20
"""An image may have holes of this size, and as many again as it has contents."""
MADV_POPULATE_WRITE: Final = 23
PIECE_BYTES: Final = 4 << 20
"""What is read past the page cache at a time."""
BLOCK: Final = 4096
"""What such reads are aligned to."""
PLAIN_INT_BITS: Final = 64
"""Larger integers are written in hexadecimal, which has no limit on digits."""

_PREFIX: Final = struct.Struct("<8sQQ")
_KIND: Final = "!"


@dataclass(slots=True)
class Layout:
    """Which bytes of the image belong to which place in the tree: offset and room, by path."""

    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    end: int = 0

    def place(self, path: str, size: int) -> tuple[int, int]:
        """The old place if it has the room, else a new one at the end."""
        known = self.places.get(path)
        if known is not None and size <= known[1]:
            return known
        room = -(-size // ALIGN) * ALIGN
        self.places[path] = self.end, room
        self.end += room
        return self.places[path]


@dataclass(frozen=True, slots=True)
class Packed:
    """A state ready to be written; the arrays in it are the caller's own, not copies."""

    tree: Any
    pieces: list[tuple[int, Any]]
    """Where in the image each array or byte string goes."""
    size: int


def pack(state: Any, layout: Layout) -> Packed:
    """Raises UsageError, with the path to it, if the state holds something that cannot be saved."""
    packer = _Packer(layout)
    tree = packer.pack(state, "state")
    if layout.end > 2 * packer.used + SLACK:
        # Things that grew or went away have left too many holes: begin a new layout.
        layout.places.clear()
        layout.end = 0
        packer = _Packer(layout)
        tree = packer.pack(state, "state")
    return Packed(tree=tree, pieces=packer.pieces, size=layout.end)


def write(packed: Packed, directory: Path, buffer: mmap.mmap | None) -> None:
    """Copy the pieces into the buffer, which maps the directory's image, and write the header."""
    if buffer is not None:
        for offset, piece in packed.pieces:
            if isinstance(piece, bytes | bytearray):
                buffer[offset : offset + len(piece)] = bytes(piece)
            else:
                numpy = sys.modules["numpy"]
                target = numpy.frombuffer(buffer, piece.dtype, piece.size, offset)
                numpy.copyto(target.reshape(piece.shape), piece)
    text = json.dumps({"size": packed.size, "tree": packed.tree}, separators=(",", ":")).encode()
    with (directory / HEADER).open("wb") as file:
        file.write(_PREFIX.pack(MAGIC, len(text), zlib.crc32(text)))
        file.write(text)


def map_image(directory: Path, size: int) -> mmap.mmap | None:
    """The directory's image as writable memory of that size, made or resized; None if empty.

    Raises OSError if there is no room: found out here, not by a bus error in the middle of a copy.
    """
    directory.mkdir(parents=True, exist_ok=True)
    fd = os.open(directory / IMAGE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size)
        if size == 0:
            return None
        os.posix_fallocate(fd, 0, size)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def populate(buffer: mmap.mmap) -> None:
    """Make all of the mapping present, without holding up other threads; older kernels decline."""
    libc = ctypes.CDLL(None)
    start = ctypes.c_char.from_buffer(buffer)
    size = ctypes.c_size_t(len(buffer))
    libc.madvise(ctypes.c_void_p(ctypes.addressof(start)), size, MADV_POPULATE_WRITE)


@dataclass(frozen=True, slots=True)
class Ahead:
    """Arrays of a state that were read before the state was final, by path in the tree."""

    arrays: dict[str, tuple[Any, Any]]
    """What the header says of it, and the array as it lies in the image."""
    size: int


def load_ahead(directory: Path) -> Ahead:
    """Read a state that may still change. Raises Damaged as `load` does."""
    _, layout, arrays = _load(directory, {}, ())
    return Ahead(arrays=arrays, size=layout.end)


def load(
    directory: Path, ahead: Ahead | None = None, changed: Sequence[tuple[int, int]] = ()
) -> tuple[Any, Layout]:
    """The state that was saved there, in arrays of its own, and the layout to go on with.

    What was read `ahead` from the same directory is used, once: only the ranges of the image
    (offset and length) that have changed since then are read. Raises Damaged if the files are not
    what a save has written.
    """
    state, layout, _ = _load(directory, {} if ahead is None else ahead.arrays, changed)
    return state, layout


_NOT_OURS: Final = (
    *(KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError, RecursionError),
    *(ImportError, SyntaxError, struct.error),
)
"""What comes of reading something that `write` has not written."""


def _load(
    directory: Path, ahead: dict[str, tuple[Any, Any]], changed: Sequence[tuple[int, int]]
) -> tuple[Any, Layout, dict[str, tuple[Any, Any]]]:
    try:
        with (directory / HEADER).open("rb") as file:
            text = _checked_header(file.read(), directory)
        with (directory / IMAGE).open("rb", buffering=0) as file:
            document = json.loads(text)
            have, want = os.fstat(file.fileno()).st_size, document["size"]
            if have < want:
                raise Damaged(
                    f"the image in {directory} has {have} of {want} bytes; "
                    "go on from an older checkpoint"
                )
            with _Reader(file.fileno(), directory) as read:
                unpacker = _Unpacker(read, want, ahead, changed)
                state = unpacker.unpack(document["tree"], "state")
            return state, Layout(places=unpacker.places, end=want), unpacker.arrays
    except OSError as error:
        raise Damaged(f"the checkpoint in {directory} cannot be read: {error.strerror}") from error
    except _NOT_OURS as error:
        raise Damaged(
            f"the checkpoint in {directory} is not one of ours ({error!r}); "
            "go on from an older checkpoint"
        ) from error


def _checked_header(raw: bytes, directory: Path) -> bytes:
    if len(raw) < _PREFIX.size or raw[:8] != MAGIC:
        raise Damaged(f"{directory / HEADER} is not the header of a checkpoint")
    _, length, crc = _PREFIX.unpack_from(raw)
    text = raw[_PREFIX.size :]
    if len(text) != length or zlib.crc32(text) != crc:
        raise Damaged(f"{directory / HEADER} is damaged; go on from an older checkpoint")
    return text


class _Reader:
    """Reads an image into arrays: from the page cache what is there, the rest past it, since an
    image is read once, and memory that holds it a second time is taken from the arrays."""

    def __init__(self, fd: int, directory: Path) -> None:
        self._fd = fd
        self._directory = directory
        self._direct: int | None = None
        self._piece = memoryview(b"")

    def __enter__(self) -> "_Reader":
        # Some file systems know only the page cache.
        with suppress(OSError):
            self._direct = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_DIRECT)
            self._piece = memoryview(mmap.mmap(-1, PIECE_BYTES))
        return self

    def __exit__(self, *_: object) -> None:
        if self._direct is not None:
            os.close(self._direct)

    def __call__(self, offset: int, into: memoryview) -> None:
        while into:
            got = self._cached(offset, into)
            if not got and self._direct is not None:
                got = self._past_cache(self._direct, offset, into)
            if not got:
                got = os.preadv(self._fd, [into], offset)
            if not got:
                raise Damaged(f"the image in {self._directory} ends too early")
            into, offset = into[got:], offset + got

    def _cached(self, offset: int, into: memoryview) -> int:
        try:
            return os.preadv(self._fd, [into], offset, os.RWF_NOWAIT)
        except OSError:
            return 0

    def _past_cache(self, direct: int, offset: int, into: memoryview) -> int:
        skipped = offset % BLOCK
        try:
            got = os.preadv(direct, [self._piece], offset - skipped) - skipped
        except OSError:
            return 0
        got = max(0, min(got, len(into)))
        into[:got] = self._piece[skipped : skipped + got]
        return got


class _Packer:
    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.pieces: list[tuple[int, Any]] = []
        self.used = 0

    def pack(self, value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            if value.bit_length() <= PLAIN_INT_BITS:
                return value
            return {_KIND: "int", "hex": format(value, "x")}
        if kind is float:
            if math.isfinite(value):
                return value
            return {_KIND: "float", "bits": struct.pack(">d", value).hex()}
        if kind is complex:
            return {_KIND: "complex", "bits": struct.pack(">dd", value.real, value.imag).hex()}
        if kind is list:
            return [self.pack(item, f"{path}[{i}]") for i, item in enumerate(value)]
        if kind is tuple:
            items = [self.pack(item, f"{path}[{i}]") for i, item in enumerate(value)]
            return {_KIND: "tuple", "items": items}
        if isinstance(value, dict):
            return self._pack_dict(value, path)
        if kind is bytes or kind is bytearray:
            return self._pack_bytes(value, kind.__name__, path)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic):
            return {_KIND: "scalar", "dtype": _dtype_name(value.dtype, path), "hex": _hex(value)}
        if numpy is not None and kind in (numpy.ndarray, numpy.memmap):
            return self._pack_array(value, path)
        raise UsageError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved; make it of "
            "numbers, text, bytes, lists, tuples, dicts and numpy arrays"
        )

    def _pack_dict(self, value: dict[Any, Any], path: str) -> Any:
        if type(value).__name__ not in ("dict", "OrderedDict", "defaultdict"):
            raise UsageError(f"{path} is a {type(value).__qualname__}; save dict(...) of it")
        if all(type(key) is str for key in value) and _KIND not in value:
            return {key: self.pack(item, f"{path}[{key!r}]") for key, item in value.items()}
        items = []
        for i, (key, item) in enumerate(value.items()):
            packed_key = self.pack(key, f"{path}.keys()[{i}]")
            items.append([packed_key, self.pack(item, f"{path}[{key!r}]")])
        return {_KIND: "dict", "items": items}

    def _pack_bytes(self, value: bytes, kind: str, path: str) -> Any:
        if len(value) <= INLINE_BYTES:
            return {_KIND: kind, "base64": base64.b64encode(value).decode()}
        offset, room = self._place(path, len(value))
        self.pieces.append((offset, value))
        return {_KIND: kind, "at": offset, "room": room, "size": len(value)}

    def _pack_array(self, value: Any, path: str) -> Any:
        dtype = _dtype_name(value.dtype, path)
        # The order of the axes in memory is part of the state: sums depend on it to the last bit.
        axes = sorted(range(value.ndim), key=lambda axis: -abs(value.strides[axis]))
        offset, room = self._place(path, value.nbytes)
        if value.size:
            self.pieces.append((offset, value.transpose(axes)))
        packed = {_KIND: "array", "dtype": dtype, "shape": list(value.shape)}
        if axes != list(range(value.ndim)):
            packed["axes"] = axes
        return {**packed, "at": offset, "room": room}

    def _place(self, path: str, size: int) -> tuple[int, int]:
        self.used += size
        return self._layout.place(path, size)


class _Unpacker:
    def __init__(
        self,
        read: Callable[[int, memoryview], None],
        end: int,
        ahead: dict[str, tuple[Any, Any]],
        changed: Sequence[tuple[int, int]],
    ) -> None:
        self._read = read
        self._end = end
        self._ahead = ahead
        self._changed = changed
        self.places: dict[str, tuple[int, int]] = {}
        self.arrays: dict[str, tuple[Any, Any]] = {}

    def unpack(self, packed: Any, path: str) -> Any:
        if isinstance(packed, list):
            return [self.unpack(item, f"{path}[{i}]") for i, item in enumerate(packed)]
        if not isinstance(packed, dict):
            return packed
        match packed.get(_KIND):
            case None:
                return {key: self.unpack(item, f"{path}[{key!r}]") for key, item in packed.items()}
            case "int":
                return int(packed["hex"], 16)
            case "float":
                return struct.unpack(">d", bytes.fromhex(packed["bits"]))[0]
            case "complex":
                return complex(*struct.unpack(">dd", bytes.fromhex(packed["bits"])))
            case "tuple":
                items = enumerate(packed["items"])
                return tuple(self.unpack(item, f"{path}[{i}]") for i, item in items)
            case "dict":
                return self._unpack_dict(packed["items"], path)
            case "bytes":
                return self._unpack_bytes(packed, path)
            case "bytearray":
                return bytearray(self._unpack_bytes(packed, path))
            case "scalar":
                dtype = _dtype_of(packed["dtype"])
                return _numpy().frombuffer(bytes.fromhex(packed["hex"]), dtype)[0]
            case "array":
                return self._unpack_array(packed, path)
            case other:
                raise ValueError(f"{path} is of the unknown kind {other!r}")

    def _unpack_dict(self, items: list[list[Any]], path: str) -> dict[Any, Any]:
        result = {}
        for i, (packed_key, item) in enumerate(items):
            key = self.unpack(packed_key, f"{path}.keys()[{i}]")
            result[key] = self.unpack(item, f"{path}[{key!r}]")
        return result

    def _unpack_bytes(self, packed: dict[str, Any], path: str) -> bytes:
        if "base64" in packed:
            return base64.b64decode(packed["base64"])
        self._check(path, packed["at"], packed["size"])
        self.places[path] = packed["at"], packed["room"]
        value = bytearray(packed["size"])
        self._read(packed["at"], memoryview(value))
        return bytes(value)

    def _check(self, path: str, start: int, size: int) -> None:
        """Before there is memory for it."""
        if not 0 <= start <= start + size <= self._end:
            raise ValueError(f"{path} is not within the image")

    def _unpack_array(self, packed: dict[str, Any], path: str) -> Any:
        numpy = _numpy()
        dtype, shape = _dtype_of(packed["dtype"]), packed["shape"]
        axes = packed.get("axes", list(range(len(shape))))
        start = packed["at"]
        self._check(path, start, math.prod(shape) * dtype.itemsize)
        self.places[path] = start, packed["room"]
        described, stored = self._ahead.get(path, (None, None))
        if described == packed:
            lacking = self._changed
        else:
            stored = numpy.empty([shape[axis] for axis in axes], dtype)
            lacking = ((start, stored.nbytes),)
        if stored.size:
            flat = memoryview(stored.reshape(-1).view(numpy.uint8))
            for offset, length in lacking:
                first, last = max(offset, start), min(offset + length, start + len(flat))
                if first < last:
                    self._read(first, flat[first - start : last - start])
        self.arrays[path] = packed, stored
        return stored.transpose([axes.index(axis) for axis in range(len(axes))])


def _dtype_name(dtype: Any, path: str) -> Any:
    if dtype.hasobject:
        raise UsageError(f"{path} holds Python objects; make it an array of numbers")
    if dtype.kind == "V" and dtype.type is not _numpy().void:
        # A type that another library has registered, such as bfloat16, is known by its name.
        return dtype.name
    return _numpy().lib.format.dtype_to_descr(dtype)


def _dtype_of(name: Any) -> Any:
    numpy = _numpy()
    if isinstance(name, list):
        return numpy.lib.format.descr_to_dtype(_tuples(name))
    try:
        return numpy.dtype(name)
    except TypeError:
        importlib.import_module("ml_dtypes")
        return numpy.dtype(name)


def _tuples(descr: list[Any]) -> list[Any]:
    """JSON has made lists of a structured type's tuples."""
    return [
        tuple(
            _tuples(entry)
            if i == 1 and isinstance(entry, list)
            else tuple(entry)
            if isinstance(entry, list)
            else entry
            for i, entry in enumerate(fields)
        )
        for fields in descr
    ]


def _hex(scalar: Any) -> str:
    value: str = scalar.tobytes().hex()
    return value


def _numpy() -> Any:
    return importlib.import_module("numpy")
