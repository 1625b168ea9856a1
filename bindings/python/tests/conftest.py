"""A network namespace for each test."""

from __future__ import annotations

import ctypes
import fcntl
import os
import pathlib
import socket
import struct
from collections.abc import Iterator

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

_libc = ctypes.CDLL(None, use_errno=True)


def _unshare(flags: int) -> None:
    if _libc.unshare(flags) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def set_sysctl(name: str, value: str) -> None:
    """Sets a sysctl of the namespace of this test."""
    pathlib.Path("/proc/sys", *name.split(".")).write_text(value)


@pytest.fixture(autouse=True)
def namespace() -> None:
    """Moves the thread of the tests into a new network namespace with a small port range. Threads of a test start there too."""
    try:
        _unshare(CLONE_NEWNET)
    except PermissionError as error:
        try:
            _unshare(CLONE_NEWUSER | CLONE_NEWNET)
        except OSError:
            if {"netns", "all"} & set(os.environ.get("FOURTUPLE_REQUIRE", "").split(",")):
                raise
            pytest.skip(f"netns: unshare(CLONE_NEWNET): {error}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    set_sysctl("net.ipv4.ip_local_port_range", f"{LOW} {HIGH}")
    # By default a port in TIME_WAIT on loopback is free again after a second.
    set_sysctl("net.ipv4.tcp_tw_reuse", "0")
    fourtuple.dialers.shared().clear()
    fourtuple.dialers.shared("short-first").clear()
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
