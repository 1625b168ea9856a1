"""A network namespace for each test."""

from __future__ import annotations

import ctypes
import fcntl
import os
import pathlib
import socket
import struct
from collections.abc import Iterator
from typing import Any

import fourtuple.dialers
import pytest
import trio._core._thread_cache as threads_of_trio
from server import Server

CLONE_NEWUSER = 0x1000_0000
CLONE_NEWNET = 0x4000_0000
SIOCSIFFLAGS = 0x8914
IFF_UP = 1

LOW, HIGH = 40_000, 40_063
PORTS = HIGH - LOW + 1

# Host names of the fixture `hosts`.
HOST = "slow.test"
PORT = 8080

SILENT: tuple[str, int, int, int] = ("::1", PORT, 0, 0)
"""A listener whose queue is full: it does not answer a SYN."""

_libc = ctypes.CDLL(None, use_errno=True)


def _unshare(flags: int) -> None:
    if _libc.unshare(flags) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def set_sysctl(name: str, value: str) -> None:
    """Sets a sysctl of the namespace of this test."""
    pathlib.Path("/proc/sys", *name.split(".")).write_text(value)


def require(name: str, is_there: bool, what: str) -> None:
    """Skips a test that this host cannot run, or fails it if FOURTUPLE_REQUIRE lists the requirement."""
    if not is_there:
        assert not {name, "all"} & set(os.environ.get("FOURTUPLE_REQUIRE", "").split(",")), f"{name}: {what}"
        pytest.skip(f"{name}: {what}")


@pytest.fixture(autouse=True)
def namespace() -> None:
    """Moves the thread of the tests into a new network namespace with a small port range. Threads of a test start there too."""
    try:
        _unshare(CLONE_NEWNET)
    except PermissionError as error:
        try:
            _unshare(CLONE_NEWUSER | CLONE_NEWNET)
        except OSError:
            require("netns", False, f"unshare(CLONE_NEWNET): {error}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    set_sysctl("net.ipv4.ip_local_port_range", f"{LOW} {HIGH}")
    # By default a port in TIME_WAIT on loopback is free again after a second.
    set_sysctl("net.ipv4.tcp_tw_reuse", "0")
    fourtuple.dialers.shared().clear()
    fourtuple.dialers.shared(census=False).clear()
    # trio keeps the threads of a run for the next one, and they are in the namespace of an earlier test.
    threads_of_trio.THREAD_CACHE = threads_of_trio.ThreadCache()


@pytest.fixture
def server(namespace: None) -> Iterator[Server]:
    """A server of HTTP that answers with the source address of the client."""
    with Server() as running:
        yield running


@pytest.fixture
def listener(namespace: None) -> Iterator[socket.socket]:
    """A listener that never accepts: the kernel completes the handshakes."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 9000))
        opened.listen(4096)
        yield opened


def addresses(host: str) -> list[tuple[int, tuple[Any, ...]]]:
    """The addresses of the host names of these tests."""
    silent = (socket.AF_INET6, SILENT)
    return [silent, (socket.AF_INET, ("127.0.0.1", PORT))] if host == HOST else [silent] * 40


@pytest.fixture
def hosts(namespace: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Host names whose first address is silent."""
    real = socket.getaddrinfo

    def lookup(host: Any, port: Any, family: int = 0, type: int = 0, *rest: Any, **more: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if not isinstance(name, str) or not name.endswith(".test"):
            return real(host, port, family, type, *rest, **more)
        found = [entry for entry in addresses(name) if family in (0, entry[0])]
        return [(entry[0], socket.SOCK_STREAM, socket.IPPROTO_TCP, "", entry[1]) for entry in found]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    with socket.socket(socket.AF_INET6) as full:
        full.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        full.bind(SILENT)
        full.listen(0)
        # The queue takes one connection; the kernel drops further SYNs.
        with socket.create_connection(SILENT[:2], 60):
            yield
