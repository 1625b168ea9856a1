"""Connections of blocking sockets."""

from __future__ import annotations

import _socket
import errno
import functools
import itertools
import select
import socket
import sys
import time
from collections.abc import Sequence
from typing import cast

from fourtuple import _native
from fourtuple.dialers import (
    AddressInfo,
    Dialers,
    DialReport,
    SocketAddress,
    SocketOption,
    check_timeout,
    failure,
    open_socket,
    report,
    shared,
)
from fourtuple.errors import SettingsError

__all__ = ["create_connection", "dial"]


class _Default:
    """The type of the default timeout: `socket.getdefaulttimeout()`."""


_DEFAULT = _Default()


def create_connection(
    address: tuple[str | None, int],
    timeout: float | _Default | None = _DEFAULT,
    source_address: tuple[str, int] | None = None,
    *,
    all_errors: bool = False,
    dialers: Dialers | None = None,
    socket_options: Sequence[SocketOption] = (),
    family: int = socket.AF_UNSPEC,
) -> socket.socket:
    """Connects like `socket.create_connection()`, with a source port that is found fast.

    Tries the addresses of the host with Happy Eyeballs (RFC 8305): while one does not answer, the next one follows after 250 ms.
    `timeout` limits them together, and not each; the resolution of the name has its own limits. `source_address` with port 0 leaves the port to
    connect(), so that one port serves many destinations; `socket.create_connection()` takes a port from the whole host.
    `socket_options` are set before connect(). `dialers`: settings, and the ledger of ports that connections share. `family`: dial
    addresses of this family only.

    Raises `DialError`, or the errors of `socket.getaddrinfo()`; with `all_errors` (Python 3.11) an `ExceptionGroup` of all addresses.
    """
    return connected(address, timeout, source_address, all_errors, dialers, socket_options, family, False)[0]


def dial(
    address: tuple[str | None, int],
    timeout: float | _Default | None = _DEFAULT,
    source_address: tuple[str, int] | None = None,
    *,
    all_errors: bool = False,
    dialers: Dialers | None = None,
    socket_options: Sequence[SocketOption] = (),
    family: int = socket.AF_UNSPEC,
) -> tuple[socket.socket, DialReport]:
    """Connects like `create_connection()`, and returns the report too."""
    opened, attempt = connected(address, timeout, source_address, all_errors, dialers, socket_options, family, True)
    return opened, report(attempt)


def connected(
    address: tuple[str | None, int],
    timeout: float | _Default | None,
    source_address: tuple[str, int] | None,
    all_errors: bool,
    dialers: Dialers | None,
    socket_options: Sequence[SocketOption],
    family: int,
    is_reported: bool,
) -> tuple[socket.socket, _native.Attempt]:
    """Connects like `create_connection()`, and returns the ended dial too."""
    limit = socket.getdefaulttimeout() if isinstance(timeout, _Default) else timeout
    check_timeout(limit)
    if all_errors and sys.version_info < (3, 11):
        raise SettingsError("all_errors = True: expected False, since Python has ExceptionGroup from 3.11 on")
    deadline = None if limit is None else time.monotonic() + limit
    dialers = dialers or shared()
    host, port = address
    found = lookup(host, port, reached(dialers, source_address, family))
    errors: list[OSError] = []
    try:
        if len(found) == 1:
            # No race: the thread sleeps in connect().
            return dialers._connect(found[0], limit, deadline, source_address, socket_options, is_reported)
        opened, attempt = _race(dialers, interleaved(found), deadline, source_address, socket_options, errors)
        if opened.gettimeout() != limit:
            opened.settimeout(limit)
        return opened, attempt
    except OSError as error:
        if not found:
            raise OSError(f"getaddrinfo({address[0]!r}) returned no address") from None
        if all_errors and sys.version_info >= (3, 11):
            raise ExceptionGroup("create_connection failed", errors or [error]) from None  # noqa: F821
        raise error
    finally:
        # The traceback of an error refers to this frame.
        errors.clear()


DELAY = 0.25
"""Seconds until the next address is dialed while the ones before have not answered (RFC 8305, section 5)."""


def interleaved(found: list[AddressInfo]) -> list[AddressInfo]:
    """Returns the addresses with the families in turn, beginning with the first one (RFC 8305, section 4)."""
    if len(found) <= 2:
        return found
    first = [entry for entry in found if entry[0] == found[0][0]]
    others = [entry for entry in found if entry[0] != found[0][0]]
    pairs = itertools.zip_longest(first, others)
    return [entry for pair in pairs for entry in pair if entry is not None]


class _Try:
    """A dial to one address, which waits for `seconds` in connect(), and then goes on with a non-blocking socket."""

    __slots__ = ("_address", "_called", "_info", "_options", "_seconds", "attempt", "is_connected", "opened")

    def __init__(
        self,
        dialers: Dialers,
        info: AddressInfo,
        source: tuple[str, int] | None,
        socket_options: Sequence[SocketOption],
        seconds: float | None,
    ) -> None:
        self._info, self._address, self._options, self._seconds = info, info[4], socket_options, seconds
        dialer = dialers.get(self._address, source)
        self.opened = self._open()
        try:
            self.attempt: _native.Attempt = dialer.prepare(self.opened)
            self.is_connected = self._connect()
        except BaseException:
            self.opened.close()
            raise

    def _open(self) -> socket.socket:
        opened = open_socket(self._info, self._options)
        opened.settimeout(self._seconds)
        return opened

    def _connect(self) -> bool:
        """Begins a handshake. Returns whether it has ended."""
        while True:
            try:
                self.opened.connect(self._address)
                self.attempt.finish(self.opened)
                return True
            except OSError as error:
                # A timeout of Python has no errno.
                if error.errno in (None, errno.EINPROGRESS, errno.EINTR):
                    break
                self._renew(failure(error))
        self._seconds = 0
        self.opened.setblocking(False)
        self._called = time.perf_counter_ns()
        return False

    def _renew(self, code: int) -> None:
        """Prepares the socket for another connect(), or raises the error of the dial."""
        if self.attempt.failed(self.opened, code):
            self.opened.close()
            self.opened = self._open()
            self.attempt.renew(self.opened)

    def answered(self) -> bool:
        """Ends the dial after its handshake. Returns false if it goes on with another port."""
        code = self.opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == 0:
            self.attempt.finish(self.opened, time.perf_counter_ns() - self._called)
            return True
        self._renew(code)
        return self._connect()

    def expire(self) -> None:
        """Ends the dial at its deadline."""
        self._renew(errno.ETIMEDOUT)
        raise TimeoutError(errno.ETIMEDOUT, f"{self._address[0]} did not answer in time")


def _race(
    dialers: Dialers,
    found: list[AddressInfo],
    deadline: float | None,
    source: tuple[str, int] | None,
    socket_options: Sequence[SocketOption],
    errors: list[OSError],
) -> tuple[socket.socket, _native.Attempt]:
    """Dials addresses side by side. Adds the error of each address, and raises the first one if no address answers."""
    rest = list(found)
    pending: list[_Try] = []
    following = 0.0
    try:
        while rest or pending:
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                for late in pending:
                    try:
                        late.expire()
                    except OSError as error:
                        errors.append(error)
                break
            if rest and (not pending or now >= following):
                # The thread sleeps in connect() while no other address is dialed: poll() takes longer.
                ends = [deadline - now] if deadline is not None else []
                ends += [DELAY] if len(rest) > 1 else []
                seconds = 0 if pending else min(ends, default=None)
                try:
                    one = _Try(dialers, rest.pop(0), source, socket_options, seconds)
                    if one.is_connected:
                        return one.opened, one.attempt
                    pending.append(one)
                except OSError as error:
                    errors.append(error)
                # Counted from the begin: the first one may have waited in connect() meanwhile.
                following = now + DELAY
                continue
            ends = [end for end in (deadline, following if rest else None) if end is not None]
            for one in _writable(pending, min(ends) - now if ends else None):
                try:
                    if one.answered():
                        pending.remove(one)
                        return one.opened, one.attempt
                except OSError as error:
                    pending.remove(one)
                    one.opened.close()
                    errors.append(error)
                    # The next address follows at once.
                    following = 0.0
    finally:
        for lost in pending:
            lost.opened.close()
    raise errors[0] if errors else TimeoutError(errno.ETIMEDOUT, "no time was left to dial")


def _writable(pending: Sequence[_Try], seconds: float | None) -> list[_Try]:
    poll = select.poll()
    by_descriptor = {one.opened.fileno(): one for one in pending}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLOUT)
    ready = poll.poll(None if seconds is None else max(0, seconds) * 1000 + 1)
    return [by_descriptor[descriptor] for descriptor, _ in ready]


def lookup(host: str | None, port: int, family: int) -> list[AddressInfo]:
    """Returns what `socket.getaddrinfo()` finds, without its members of enumerations, and for an IP address without a call.

    A function that a program has set in the place of `socket.getaddrinfo()` is called for addresses too.
    """
    if socket.getaddrinfo is not _getaddrinfo:
        return list(socket.getaddrinfo(host, port, family, socket.SOCK_STREAM))
    known = _numeric(host, port, family)
    return [known] if known else list(_socket.getaddrinfo(host, port, family, socket.SOCK_STREAM))


def numeric(host: object, port: object, family: int) -> AddressInfo | None:
    """Returns what `lookup()` finds for an IP address without a call, and `None` for other arguments."""
    return _numeric(host, port, family) if socket.getaddrinfo is _getaddrinfo else None


# Not a function that replaces it already.
_getaddrinfo = socket.getaddrinfo if getattr(socket.getaddrinfo, "__globals__", None) is socket.__dict__ else None


@functools.lru_cache(1024, typed=True)
def _numeric(host: object, port: object, family: int) -> AddressInfo | None:
    if type(host) is not str or type(port) is not int or not 0 <= port <= 0xFFFF:
        return None
    is_ipv6 = ":" in host
    if family not in (socket.AF_UNSPEC, socket.AF_INET6 if is_ipv6 else socket.AF_INET):
        return None
    try:
        if is_ipv6:
            host = socket.inet_ntop(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, host))
            return socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port, 0, 0)
        if host[-1:].isdigit():
            socket.inet_pton(socket.AF_INET, host)
            return socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port)
    except (OSError, ValueError):
        pass
    return None


def reached(dialers: Dialers, source_address: tuple[str, int] | None, family: int = socket.AF_UNSPEC) -> int:
    """Returns the family of the addresses to dial."""
    if source_address is not None and source_address[0]:
        return socket.AF_INET6 if ":" in source_address[0] else socket.AF_INET
    return family or dialers.family


def target(address: tuple[object, ...]) -> SocketAddress:
    """Returns an address of `socket.getaddrinfo()` with its type."""
    if len(address) in (2, 4) and isinstance(address[0], str) and isinstance(address[1], int):
        return cast(SocketAddress, address)
    raise ValueError(f"{address!r} is not an address of AF_INET or AF_INET6")
