"""Loads BPF programs with nothing but the bpf system call: ELF reader, maps, links, pins."""

import ctypes
import errno
import hashlib
import mmap
import os
import platform
import re
import shutil
import struct
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reclaimnet.errors import Unavailable

# enum bpf_cmd, bpf_prog_type and bpf_attach_type: a stable kernel interface.
_MAP_CREATE: Final = 0
_MAP_LOOKUP: Final = 1
_MAP_UPDATE: Final = 2
_MAP_DELETE: Final = 3
_PROG_LOAD: Final = 5
_OBJ_PIN: Final = 6
_OBJ_GET: Final = 7
_GET_INFO: Final = 15
_LINK_CREATE: Final = 28

PROG_SCHED_CLS: Final = 3
PROG_CGROUP_SKB: Final = 8
ATTACH_CGROUP_INGRESS: Final = 0
ATTACH_CGROUP_EGRESS: Final = 1
ATTACH_TCX_INGRESS: Final = 46
ATTACH_TCX_EGRESS: Final = 47

_SYSCALL_NUMBER: Final = {
    "x86_64": 321,
    "aarch64": 280,
    "riscv64": 280,
    "ppc64le": 361,
}
_ATTR_BYTES: Final = 144
_LOG_BYTES: Final = 1 << 18
_LINK_INFO_BYTES: Final = 64
_LINK_INFO_IFINDEX: Final = 16
_PSEUDO_MAP_FD: Final = 1
_R_BPF_64_64: Final = 1
_BPF_FS_MAGIC: Final = 0xCAFE4A11
_COMPILE_SECONDS: Final = 60

_libc: Final = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MapSpec:
    """One map as the object file declares it."""

    type: int
    key_size: int
    value_size: int
    max_entries: int
    flags: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSpec:
    """One program's instructions, and where in them which map's fd belongs."""

    section: str
    code: bytes
    map_refs: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BpfObject:
    """What a compiled object file holds."""

    license: str
    maps: Mapping[str, MapSpec]
    programs: Mapping[str, ProgramSpec]


# --- from source to object -----------------------------------------------------------------


def compiled(source: Path, *, cache: Path) -> Path:
    """The object file of a BPF source, compiled now unless the cache has it for the same text."""
    texts = [path.read_bytes() for path in sorted(source.parent.glob("*.[ch]"))]
    key = hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]
    target = cache / f"{source.name.removesuffix('.bpf.c')}-{key}.o"
    if target.exists():
        return target
    clang = shutil.which("clang")
    if clang is None:
        raise Unavailable(
            "The kill switch has to be compiled once and clang is not installed: "
            "install it (apt-get install clang) and try again."
        )
    cache.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=cache, suffix=".o")
    os.close(descriptor)
    multiarch = sysconfig.get_config_var("MULTIARCH") or platform.machine()
    command = [clang, "-O2", "-g", "-target", "bpf", "-Wall"]
    command += ["-idirafter", f"/usr/include/{multiarch}", "-c", str(source), "-o", temporary]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False
        )
        if done.returncode != 0:
            raise Unavailable(
                f"clang could not compile {source.name} (are the kernel headers of the package "
                f"linux-libc-dev installed?): {done.stderr.strip()}"
            )
        # Others may compile at the same moment; a rename leaves a whole file in any case.
        Path(temporary).replace(target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target


def read_object(data: bytes) -> BpfObject:
    """Parse a little-endian 64-bit ELF object with maps in "maps" and one program a section."""
    sections = _sections(data)
    symbols = _symbols(sections)
    by_name = {section.name: section for section in sections}
    maps_at = next((i for i, section in enumerate(sections) if section.name == "maps"), -1)
    maps: dict[str, MapSpec] = {}
    programs: dict[str, ProgramSpec] = {}
    for name, kind, where, value in symbols:
        if where == maps_at and name:
            fields = struct.unpack_from("<5I", sections[where].body, value)
            maps[name] = MapSpec(
                **dict(zip(MapSpec.__slots__, fields, strict=True))  # the C struct's rank
            )
        elif kind == _STT_FUNC:
            section = sections[where]
            refs = []
            relocations = by_name.get(f".rel{section.name}")
            if relocations is not None:
                for offset, info in struct.iter_unpack("<QQ", relocations.body):
                    assert info & 0xFFFFFFFF == _R_BPF_64_64, "a program may refer to maps only"
                    refs.append((offset, symbols[info >> 32][0]))
            programs[name] = ProgramSpec(
                section=section.name, code=section.body, map_refs=tuple(refs)
            )
    license_text = by_name["license"].body.rstrip(b"\0").decode()
    return BpfObject(license=license_text, maps=maps, programs=programs)


_STT_FUNC: Final = 2
_SHT_SYMTAB: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    name: str
    kind: int
    link: int
    body: bytes


def _sections(data: bytes) -> list[_Section]:
    if data[:6] != b"\x7fELF\x02\x01":
        raise Unavailable("The kill switch's object file is damaged: delete it and try again.")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", data, 0x3A)
    heads = [struct.unpack_from("<IIQQQQII", data, table + i * size) for i in range(count)]
    names = heads[names_at][4]
    return [
        _Section(
            name=data[names + head[0] : data.index(0, names + head[0])].decode(),
            kind=head[1],
            link=head[6],
            body=data[head[4] : head[4] + head[5]],
        )
        for head in heads
    ]


def _symbols(sections: list[_Section]) -> list[tuple[str, int, int, int]]:
    """(name, kind, section, value) of each symbol."""
    table = next(section for section in sections if section.kind == _SHT_SYMTAB)
    names = sections[table.link].body
    return [
        (names[at : names.index(0, at)].decode(), info & 0xF, where, value)
        for at, info, _, where, value, _ in struct.iter_unpack("<IBBHQQ", table.body)
    ]


# --- the system call -----------------------------------------------------------------------


def bpf(command: int, attr: bytes) -> int:
    """bpf(2); raises OSError."""
    number = _SYSCALL_NUMBER.get(platform.machine())
    if number is None:
        raise Unavailable(f"The kill switch does not know BPF on {platform.machine()} machines.")
    buffer = ctypes.create_string_buffer(attr.ljust(_ATTR_BYTES, b"\0"), _ATTR_BYTES)
    result = int(_libc.syscall(number, command, buffer, _ATTR_BYTES))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"bpf({command}): {os.strerror(code)}")
    return result


class Map:
    """An open BPF map."""

    def __init__(self, fd: int, spec: MapSpec) -> None:
        self.fd = fd
        self.spec = spec

    @classmethod
    def create(cls, name: str, spec: MapSpec) -> "Map":
        attr = struct.pack(
            "<5I8x16s",
            spec.type,
            spec.key_size,
            spec.value_size,
            spec.max_entries,
            spec.flags,
            name.encode()[:15],
        )
        # The name field comes after inner_map_fd and numa_node, 28 bytes in.
        return cls(bpf(_MAP_CREATE, attr), spec)

    @classmethod
    def opened(cls, path: Path, spec: MapSpec) -> "Map":
        return cls(_get_pinned(path), spec)

    def pin(self, path: Path) -> None:
        _pin(self.fd, path)

    def mapped(self) -> mmap.mmap:
        """The map's memory: a store into it is seen by the next packet."""
        pages = -(-self.spec.value_size * self.spec.max_entries // mmap.PAGESIZE)
        return mmap.mmap(self.fd, pages * mmap.PAGESIZE)

    def get(self, key: bytes, *, copies: int = 1) -> bytes | None:
        """The value; a per-CPU map has one copy (padded to 8 bytes) for each possible CPU."""
        value = ctypes.create_string_buffer(-(-self.spec.value_size // 8) * 8 * copies)
        held = ctypes.create_string_buffer(key, self.spec.key_size)
        try:
            bpf(_MAP_LOOKUP, self._element(held, value))
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None
            raise
        return value.raw

    def put(self, key: bytes, value: bytes) -> None:
        held = ctypes.create_string_buffer(key, self.spec.key_size)
        new = ctypes.create_string_buffer(value, self.spec.value_size)
        bpf(_MAP_UPDATE, self._element(held, new))

    def drop(self, key: bytes) -> None:
        """Forget the key, if it is there."""
        held = ctypes.create_string_buffer(key, self.spec.key_size)
        try:
            bpf(_MAP_DELETE, self._element(held, None))
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _element(
        self, key: "ctypes.Array[ctypes.c_char]", value: "ctypes.Array[ctypes.c_char] | None"
    ) -> bytes:
        at = 0 if value is None else ctypes.addressof(value)
        return struct.pack("<I4xQQQ", self.fd, ctypes.addressof(key), at, 0)


def load_program(
    name: str, spec: ProgramSpec, *, kind: int, maps: Mapping[str, Map], license_text: str
) -> int:
    """The fd of a program that the kernel has verified."""
    code = bytearray(spec.code)
    for offset, map_name in spec.map_refs:
        registers = code[offset + 1] & 0x0F | _PSEUDO_MAP_FD << 4
        code[offset + 1] = registers
        struct.pack_into("<i", code, offset + 4, maps[map_name].fd)
    text = ctypes.create_string_buffer(bytes(code), len(code))
    permit = ctypes.create_string_buffer(license_text.encode() + b"\0")
    log = ctypes.create_string_buffer(_LOG_BYTES)

    def attr(*, verbose: bool) -> bytes:
        head = struct.pack(
            "<IIQQ", kind, len(code) // 8, ctypes.addressof(text), ctypes.addressof(permit)
        )
        logging = (1, _LOG_BYTES, ctypes.addressof(log)) if verbose else (0, 0, 0)
        return head + struct.pack("<IIQII16s", *logging, 0, 0, name.encode()[:15])

    try:
        return bpf(_PROG_LOAD, attr(verbose=False))
    except OSError as error:
        if error.errno == errno.EPERM:
            raise Unavailable(
                "The kill switch needs root (CAP_BPF and CAP_NET_ADMIN): run the guard as root."
            ) from error
        try:
            return bpf(_PROG_LOAD, attr(verbose=True))
        except OSError:
            tail = " | ".join(log.value.decode(errors="replace").strip().splitlines()[-3:])
            raise Unavailable(
                f"The kernel does not take the BPF program {name} ({error.strerror}): {tail}"
            ) from error


def create_link(program: int, *, target: int, attach: int) -> int:
    """The fd of a link; `target` is an interface of the calling thread's namespace or a cgroup."""
    return bpf(_LINK_CREATE, struct.pack("<IIII", program, target, attach, 0))


def pin_link(link: int, path: Path) -> None:
    _pin(link, path)


def open_link(path: Path) -> int:
    return _get_pinned(path)


def link_interface(link: int) -> int:
    """The interface that a tcx link is on; 0 if that is gone, and the link does nothing."""
    info = ctypes.create_string_buffer(_LINK_INFO_BYTES)
    bpf(_GET_INFO, struct.pack("<IIQ", link, _LINK_INFO_BYTES, ctypes.addressof(info)))
    return int(struct.unpack_from("<I", info.raw, _LINK_INFO_IFINDEX)[0])


def possible_cpus() -> int:
    """Per-CPU maps hold a value for each of these, whether it is there or not."""
    text = Path("/sys/devices/system/cpu/possible").read_text()
    return int(re.split(r"[-,]", text.strip())[-1]) + 1


# --- the file system that pins live in -----------------------------------------------------


def is_bpffs(path: Path) -> bool:
    buffer = ctypes.create_string_buffer(256)
    if _libc.statfs(os.fsencode(path), buffer) != 0:
        return False
    return bool(struct.unpack_from("<q", buffer.raw)[0] & 0xFFFFFFFF == _BPF_FS_MAGIC)


def ensure_bpffs(path: Path) -> bool:
    """Make sure that pins can live in the folder; True if it had to be mounted for that."""
    path.mkdir(parents=True, exist_ok=True)
    if is_bpffs(path):
        return False
    if _libc.mount(b"bpf", os.fsencode(path), b"bpf", 0, b"mode=0700") != 0:
        reason = os.strerror(ctypes.get_errno())
        raise Unavailable(f"No BPF file system can be mounted at {path} ({reason}): run as root.")
    return True


def prepare_pins(pins: Path) -> None:
    """Pins live on a BPF file system: the machine's own, or one of ours if it has none there."""
    if pins.parent == Path("/sys/fs/bpf"):
        ensure_bpffs(pins.parent)
    elif not (pins.parent.exists() and is_bpffs(pins.parent)):
        ensure_bpffs(pins)
    pins.mkdir(exist_ok=True, mode=0o700)


def drop_pins(pins: Path) -> None:
    """Undo `prepare_pins`."""
    if pins.is_mount():
        drop_bpffs(pins)
    if pins.exists():
        pins.rmdir()


def drop_bpffs(path: Path) -> None:
    """Unmount what `ensure_bpffs` has mounted."""
    if _libc.umount2(os.fsencode(path), 0) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise Unavailable(f"The BPF file system at {path} is still in use ({reason}).")


def _pin(fd: int, path: Path) -> None:
    name = ctypes.create_string_buffer(os.fsencode(path))
    bpf(_OBJ_PIN, struct.pack("<QII", ctypes.addressof(name), fd, 0))


def _get_pinned(path: Path) -> int:
    name = ctypes.create_string_buffer(os.fsencode(path))
    return bpf(_OBJ_GET, struct.pack("<QII", ctypes.addressof(name), 0, 0))
