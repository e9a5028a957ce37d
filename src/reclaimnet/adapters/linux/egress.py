"""Keeps a group's packets within a few networks: a small BPF program on its cgroup (version 2).

The program looks at each packet that a process of the group sends, whatever its protocol, and drops
those to other networks. It stays with the group until that is removed, whoever else is alive.
"""

import os
import struct
from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Final

from reclaimnet.adapters.linux import bpfload

ATTACH_CGROUP_EGRESS: Final = 1
PROG_ATTACH: Final = 8
SKB_PROTOCOL: Final = 16
"""Where `struct __sk_buff` has the packet's protocol, in network order."""
IPV4: Final = 0x0800
IPV6: Final = 0x86DD
DESTINATION_4: Final = 16
DESTINATION_6: Final = 24
"""Where the destination is in the header."""
LOAD_BYTES: Final = 26
"""The number of bpf_skb_load_bytes."""
STACK: Final = -16

Networks = Sequence[IPv4Network | IPv6Network]


def confine(group: Path, networks: Networks) -> None:
    """From now on packets of the group's sockets reach these networks only. Raises OSError or
    Unavailable."""
    spec = bpfload.ProgramSpec(section="", code=program(networks), map_refs=())
    kind = bpfload.PROG_CGROUP_SKB
    loaded = bpfload.load_program("rn_egress", spec, kind=kind, maps={}, license_text="Apache-2.0")
    target = os.open(group, os.O_RDONLY | os.O_DIRECTORY)
    try:
        attr = struct.pack("<IIII", target, loaded, ATTACH_CGROUP_EGRESS, 0)
        bpfload.bpf(PROG_ATTACH, attr)
    finally:
        os.close(target)
        os.close(loaded)


def program(networks: Networks) -> bytes:
    """The instructions; a packet of neither kind of IP is dropped."""
    four = [network for network in networks if isinstance(network, IPv4Network)]
    six = [network for network in networks if isinstance(network, IPv6Network)]
    on_four = _to_any(DESTINATION_4, 1, [_words(network) for network in four])
    on_six = _to_any(DESTINATION_6, 4, [_words(network) for network in six])
    return b"".join(
        [
            _op(0xBF, 6, 1),  # r6 = the packet
            _op(0x61, 7, 6, SKB_PROTOCOL),  # r7 = its protocol
            _op(0x55, 7, 0, len(on_four) // 8, _network_order(IPV4)),
            on_four,
            _op(0x55, 7, 0, len(on_six) // 8, _network_order(IPV6)),
            on_six,
            _verdict(0),
        ]
    )


def _to_any(offset: int, count: int, networks: list[list[tuple[int, int]]]) -> bytes:
    """Reads `count` words of the destination, and ends with the verdict."""
    code = [
        _op(0xBF, 1, 6),
        _op(0xB7, 2, 0, 0, offset),
        _op(0xBF, 3, 10),
        _op(0x07, 3, 0, 0, STACK),
        _op(0xB7, 4, 0, 0, 4 * count),
        _op(0x85, 0, 0, 0, LOAD_BYTES),
        _op(0x15, 0, 0, 2, 0),
        _verdict(0),
    ]
    for words in networks:
        tests = [
            [
                _op(0x61, 1, 10, STACK + 4 * index),
                _op(0xB4, 2, 0, 0, mask),
                _op(0x5F, 1, 2),
                _op(0xB4, 2, 0, 0, value),
            ]
            for index, (value, mask) in enumerate(words)
        ]
        # Each word takes five instructions, and the verdict two.
        left = 5 * len(tests) + 2
        for test in tests:
            left -= 5
            code += [*test, _op(0x5D, 1, 2, left)]
        code.append(_verdict(1))
    return b"".join([*code, _verdict(0)])


def _words(network: IPv4Network | IPv6Network) -> list[tuple[int, int]]:
    """Address and mask in words of 32 bits as they are read from the packet, without those words
    whose bits may all be anything."""
    address, mask = network.network_address.packed, network.netmask.packed
    pairs = [
        (struct.unpack_from("=i", address, at)[0], struct.unpack_from("=i", mask, at)[0])
        for at in range(0, len(address), 4)
    ]
    return [pair for pair in pairs if pair[1]]


def _verdict(passes: int) -> bytes:
    return _op(0xB7, 0, 0, 0, passes) + _op(0x95)


def _network_order(number: int) -> int:
    return int(struct.unpack("=H", struct.pack("!H", number))[0])


def _op(code: int, target: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
    return struct.pack("=BBhi", code, source << 4 | target, offset, value)
