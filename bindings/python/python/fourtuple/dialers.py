"""Dialers by destination, and the dial on a blocking socket."""

from __future__ import annotations

import errno
import functools
import ipaddress
import os
import socket
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Union

from fourtuple import _native
from fourtuple.errors import SettingsError

__all__ = ["DialReport", "Dialers", "SocketAddress", "SocketOption"]

SocketAddress = Union[tuple[str, int], tuple[str, int, int, int]]
"""An address of AF_INET or AF_INET6 as `socket.getaddrinfo()` returns it."""

AddressInfo = tuple[int, int, int, str, Any]
"""An entry of `socket.getaddrinfo()`: family, type, protocol, canonical name and address."""

SocketOption = tuple[int, int, Union[int, bytes]]
"""Arguments of `socket.setsockopt()`."""


MIN_LEFT = 0.001
"""Seconds that a dial has at least, so that one whose name was resolved too late fails with the error of a timeout."""


class DialReport(NamedTuple):
    """The source port of a connection, and the time it took to get it."""

    strategy: str
    """The strategy of the dial."""
    source: tuple[str, int]
    """Source address and port."""
    attempts: int
    """Calls of bind() or connect() to get a port, the successful call included."""
    connect_ns: int
    """Time in connect(), in nanoseconds; on a blocking socket with the handshake."""
    handshake_ns: int
    """Time waited for the handshake after a non-blocking connect(), in nanoseconds."""


class Dialers:
    """A bounded cache of one dialer per destination, shared by threads and event loops of a process.

    `sources`: source addresses and networks, such as `"10.0.0.0/28"` or a list; by default the kernel chooses by route.
    `strategy`: `auto`, `full-range`, `random-window:WIDTH`, `select-test-repeat` or `kernel-default`; docs/dial.md describes them.
    `device`: setsockopt(SO_BINDTODEVICE). `census`: count the holders of the ports when no port is free. `limit`: destinations in
    the cache; the least recently used goes first.

    `searches` says what the strategy `auto` may do. `any`: what docs/dial.md says, with a ledger of the ports in use, which takes
    1.2 us for each port to build. `short-first`: connect() searches eight windows of 1,000 ports at random places, and then all
    ports; without a ledger. `short`: as `short-first`, and the dial fails after these windows. A kernel without IP_LOCAL_PORT_RANGE
    has no windows and does the same as with `any`. A pool of several sources always has a ledger.
    """

    def __init__(
        self,
        *,
        sources: str | Iterable[str] | None = None,
        strategy: str = "auto",
        device: str | None = None,
        census: bool = True,
        searches: Literal["any", "short-first", "short"] = "any",
        limit: int = 1024,
    ) -> None:
        text = sources if sources is None or isinstance(sources, str) else ",".join(sources)
        self._sources = text
        self._strategy = strategy
        self._device = device
        self._census = census
        self._searches = searches
        self._limit = max(1, limit)
        self._reset()
        self.family = _family(text)
        """The address family that the sources can reach: `socket.AF_UNSPEC` without sources."""
        # Wrong settings fail here, and not in the first dial. An explicit strategy makes no probe.
        loopback = "::1" if self.family == socket.AF_INET6 else "127.0.0.1"
        check = "kernel-default" if strategy == "auto" else strategy
        _native.Dialer(loopback, 9, sources=text, strategy=check, device=device, searches=searches)

    def _reset(self) -> None:
        """Begins with an empty cache and a new lock."""
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[object, ...], _native.Dialer] = OrderedDict()
        _all.add(self)

    def __getstate__(self) -> dict[str, object]:
        # A copy has the settings. Its dialers are its own: the ledger of another process does not fit.
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_cache")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._reset()

    def get(self, address: SocketAddress, source: tuple[str, int] | None = None) -> _native.Dialer:
        """Returns the dialer to an address, and builds a missing one: probes the kernel and lists the ports in use.

        `source`: a source address and port in the place of the pool; an empty host or port 0 leaves the choice open.
        """
        key: tuple[object, ...] = address if source is None else (address, source)
        if (cached := self.cached(key)) is not None:
            return cached
        host, port = source or ("", 0)
        dialer = _native.Dialer(
            *address,
            sources=host or self._sources,
            strategy=self._strategy,
            source_port=port or None,
            device=self._device,
            census=self._census,
            searches=self._searches,
        )
        with self._lock:
            # Another thread may have built the same dialer meanwhile: all use one ledger.
            dialer = self._cache.setdefault(key, dialer)
            while len(self._cache) > self._limit:
                self._cache.popitem(last=False)
        return dialer

    def cached(self, address: tuple[object, ...]) -> _native.Dialer | None:
        """Returns the dialer to an address if it is built already."""
        try:
            # Each call is atomic. With the lock both would take three times as long.
            self._cache.move_to_end(address)
            return self._cache[address]
        except KeyError:
            return None

    def clear(self) -> None:
        """Removes all dialers, for example after a change of net.ipv4.ip_local_port_range."""
        with self._lock:
            self._cache.clear()

    @property
    def destinations(self) -> int:
        """The number of destinations in the cache."""
        return len(self._cache)

    def connect(
        self,
        info: tuple[int, int, int],
        address: SocketAddress,
        *,
        timeout: float | None = None,
        source: tuple[str, int] | None = None,
        socket_options: Sequence[SocketOption] = (),
    ) -> tuple[socket.socket, DialReport]:
        """Opens a socket of (family, type, protocol), sets its options and connects it. Blocks for at most `timeout` seconds.

        Raises `DialError`.
        """
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        entry = *info, "", address
        opened, attempt = self._connect(entry, timeout, deadline, source, socket_options, True)
        return opened, report(attempt)

    def _connect(
        self,
        info: AddressInfo,
        timeout: float | None,
        deadline: float | None,
        source: tuple[str, int] | None,
        socket_options: Sequence[SocketOption],
        is_reported: bool,
    ) -> tuple[socket.socket, _native.Attempt]:
        """Connects like `connect()`, until `deadline` of `time.monotonic()`. The socket has `timeout` then."""
        family, type, proto, _, address = info
        dialer = self.get(address, source)
        opened = socket.socket(family, type, proto)
        try:
            if socket_options:
                set_options(opened, socket_options)
            left = timeout
            # Each other timeout is a system call at the end.
            if deadline is not None and timeout is not None and deadline - time.monotonic() < timeout - MIN_LEFT:
                left = max(MIN_LEFT, deadline - time.monotonic())
            if opened.gettimeout() != left:
                opened.settimeout(left)
            attempt = dialer.prepare(opened)
            while True:
                try:
                    opened.connect(address)
                    break
                except OSError as error:
                    if attempt.failed(opened, failure(error)):
                        opened.close()
                        opened = open_socket(info, socket_options)
                        attempt.renew(opened)
                    opened.settimeout(None if deadline is None else max(MIN_LEFT, deadline - time.monotonic()))
            attempt.finish(opened, 0, is_reported)
            if opened.gettimeout() != timeout:
                opened.settimeout(timeout)
            return opened, attempt
        except BaseException:
            opened.close()
            raise


def check_timeout(timeout: float | None) -> None:
    """Raises `SettingsError` for a timeout that is no time: 0 means non-blocking elsewhere, which is another function."""
    if timeout is not None and not timeout > 0:
        raise SettingsError(f"timeout = {timeout!r}: expected seconds above 0, or None to wait without a limit")


def failure(error: OSError) -> int:
    """Returns the errno of a failed connect(). A timeout of Python has none."""
    # Before Python 3.10 it is not a TimeoutError.
    if isinstance(error, (TimeoutError, socket.timeout)):
        return errno.ETIMEDOUT
    return error.errno or errno.EIO


def report(attempt: _native.Attempt) -> DialReport:
    """Returns the report of a finished dial."""
    assert attempt.report is not None
    return DialReport(*attempt.report)


def open_socket(info: tuple[int, int, int] | AddressInfo, socket_options: Sequence[SocketOption]) -> socket.socket:
    """Opens a socket of (family, type, protocol) with options."""
    opened = socket.socket(*info[:3])
    set_options(opened, socket_options)
    return opened


def replace(opened: socket.socket, socket_options: Sequence[SocketOption]) -> None:
    """Replaces the socket of a descriptor by a new one with these options: a port bound by number stays bound to the old socket."""
    timeout = opened.gettimeout()
    with open_socket((opened.family, opened.type, opened.proto), socket_options) as fresh:
        os.dup2(fresh.fileno(), opened.fileno(), inheritable=opened.get_inheritable())
    opened.settimeout(timeout)


def set_options(opened: socket.socket, socket_options: Sequence[SocketOption]) -> None:
    """Sets options of a new socket, and closes the socket if one fails."""
    try:
        for level, name, value in socket_options:
            opened.setsockopt(level, name, value)
    except BaseException:
        opened.close()
        raise


def _family(sources: str | None) -> int:
    """Returns the family of a pool. The extension checks the pool itself."""
    if sources is None:
        return socket.AF_UNSPEC
    first = sources.split(",")[0].strip()
    try:
        version = ipaddress.ip_network(first, strict=False).version
    except ValueError:
        raise SettingsError(
            f"{first!r} is not a source: expected an address such as 10.0.0.7, or a network such as 127.0.0.0/28"
        ) from None
    return socket.AF_INET if version == 4 else socket.AF_INET6


_all: weakref.WeakSet[Dialers] = weakref.WeakSet()


@functools.lru_cache(None)
def shared(census: bool = True) -> Dialers:
    """Returns the dialers of calls and adapters without dialers of their own."""
    return Dialers(searches="short-first", census=census)


def _reset_all() -> None:
    # A lock that another thread held at fork() would never be released in the child, and the ledgers are the parent's. Adapters,
    # transports and socket factories have dialers of their own: all of them begin anew.
    for dialers in list(_all):
        dialers._reset()


os.register_at_fork(after_in_child=_reset_all)
