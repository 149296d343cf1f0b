"""
Hosts that the kernel does not answer for a moment, so that a loop of connections costs the gateway nothing.

A host that exceeds `gateway.host_connections_per_second` is refused. A refusal still costs the gateway an
accept, and a client that connects again at once makes thousands of them in a second. So the listening socket
gets a filter, a program of classic BPF that the kernel runs for each segment that arrives. It drops the first
segment of a connection (SYN) that comes from a refused host, and lets all others pass. The client's kernel
sends the SYN again after a second. Then the filter has gone, and the host has new tokens.

A filter needs no privilege. It belongs to the socket and not to a process: workers of one port share it, and
each of them replaces it by its own. A host that another worker's filter knew may connect earlier then, and
is refused again. What a worker leaves behind when it ends is taken away by `answer_all`.

Sockets that are accepted inherit the filter. It is taken off them: it would run for each of their segments.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Collection

log = structlog.get_logger(__name__)

HOSTS_MAX: Final = 64
"""
How many hosts a filter has at most; further ones are refused only.

A filter for 64 hosts of IPv6 takes 8 KiB. Older kernels allow 20 KiB for what is attached to a socket.
"""
DROP_SECONDS: Final = 0.9
"""The client's kernel sends its SYN again after a second (RFC 6298), and the filter has gone by then."""

_SO_ATTACH_FILTER: Final = 26
_SO_DETACH_FILTER: Final = 27
_INSTRUCTION: Final = struct.Struct("=HBBI")
"""Code, how many instructions to skip if a test is true and if it is not, and a number."""
_PROGRAM: Final = struct.Struct("@HP")
"""The number of instructions, and where they are."""
_LOAD_WORD, _LOAD_BYTE, _LOAD_SAVED, _SAVE = 0x20, 0x30, 0x60, 0x02
_AND, _GO, _IF_EQUAL, _RETURN = 0x54, 0x05, 0x15, 0x06
_PASS, _DROP = 0xFFFFFFFF, 0
"""How many bytes of a segment pass."""
_NETWORK_HEADER: Final = 0xFFF00000
"""Offsets from here on are in the IP header; smaller ones are in the TCP header."""
_TCP_FLAGS, _SYN, _ACK = 13, 0x02, 0x10
_IPV4_SOURCE, _IPV6_SOURCE, _WORDS = 12, 8, 4

Instruction = tuple[int, int, int, int]


def filter_of(hosts: Collection[IPv4Address | IPv6Address]) -> list[Instruction]:
    """Return the program that drops first segments from *hosts*, which have at most `HOSTS_MAX` members."""
    ipv4: list[Instruction] = [(_LOAD_WORD, 0, 0, _NETWORK_HEADER + _IPV4_SOURCE)]
    ipv6: list[Instruction] = []
    for word in range(_WORDS):
        ipv6.append((_LOAD_WORD, 0, 0, _NETWORK_HEADER + _IPV6_SOURCE + 4 * word))
        ipv6.append((_SAVE, 0, 0, word))
    for host in hosts:
        if isinstance(host, IPv4Address):
            ipv4 += [(_IF_EQUAL, 0, 1, int(host)), (_RETURN, 0, 0, _DROP)]
            continue
        for word, value in enumerate(struct.unpack(">4I", host.packed)):
            ipv6.append((_LOAD_SAVED, 0, 0, word))
            # Past the tests of the other words, and past the return.
            ipv6.append((_IF_EQUAL, 0, 2 * (_WORDS - 1 - word) + 1, value))
        ipv6.append((_RETURN, 0, 0, _DROP))
    ipv4.append((_RETURN, 0, 0, _PASS))
    ipv6.append((_RETURN, 0, 0, _PASS))
    return [
        (_LOAD_BYTE, 0, 0, _TCP_FLAGS),
        (_AND, 0, 0, _SYN | _ACK),
        (_IF_EQUAL, 1, 0, _SYN),
        (_RETURN, 0, 0, _PASS),
        (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
        (_AND, 0, 0, 0xF0),
        # A test skips 255 instructions at most.
        (_IF_EQUAL, 1, 0, 0x40),
        (_GO, 0, 0, len(ipv4)),
        *ipv4,
        *ipv6,
    ]


def address_of(host: str) -> IPv4Address | IPv6Address:
    """Return the address that the kernel sees in the IP header of a client at *host*."""
    address = ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def answer_all(sock: socket.socket) -> None:
    """Take away the filter that *sock* has, if any."""
    if sys.platform == "linux":
        # There is none: the usual case.
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


class UnansweredHosts:
    """The hosts that a listening socket does not answer now. Belongs to one event loop."""

    def __init__(
        self, listener: socket.socket, loop: asyncio.AbstractEventLoop, *, seconds: float = DROP_SECONDS
    ) -> None:
        """Answer every host. *seconds* is how long a host that is added gets no answer."""
        self._listener = listener
        self._loop = loop
        self._seconds = seconds
        self._ends: dict[IPv4Address | IPv6Address, asyncio.TimerHandle] = {}
        self._is_usable = sys.platform == "linux"
        answer_all(listener)

    def __len__(self) -> int:
        """Return how many hosts get no answer now."""
        return len(self._ends)

    def add(self, host: str) -> bool:
        """Do not answer *host* from now on, for a while. Return whether that is new."""
        if not self._is_usable:
            return False
        address = address_of(host)
        if address in self._ends or len(self._ends) >= HOSTS_MAX:
            return False
        self._ends[address] = self._loop.call_later(self._seconds, self._answer, address)
        self._attach()
        return self._is_usable

    def close(self) -> None:
        """Answer every host."""
        self._is_usable = False
        for timer in self._ends.values():
            timer.cancel()
        self._ends.clear()
        answer_all(self._listener)

    def _answer(self, address: IPv4Address | IPv6Address) -> None:
        del self._ends[address]
        if self._ends:
            self._attach()
        else:
            answer_all(self._listener)

    def _attach(self) -> None:
        program = filter_of(self._ends)
        code = ctypes.create_string_buffer(b"".join(_INSTRUCTION.pack(*one) for one in program))
        try:
            self._listener.setsockopt(
                socket.SOL_SOCKET, _SO_ATTACH_FILTER, _PROGRAM.pack(len(program), ctypes.addressof(code))
            )
        except OSError as error:
            log.warning(
                "the kernel takes no filter for hosts that connect too often; they are refused one by one",
                error=str(error),
                hint="A sandbox or a seccomp profile may forbid SO_ATTACH_FILTER; the limit holds without it",
            )
            self.close()
