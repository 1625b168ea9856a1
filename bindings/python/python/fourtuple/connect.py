"""Connections of blocking sockets."""

from __future__ import annotations

import errno
import itertools
import select
import socket
import sys
import time
from collections.abc import Sequence
from typing import cast

from fourtuple import _native
from fourtuple.dialers import (
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
    return dial(
        address,
        timeout,
        source_address,
        all_errors=all_errors,
        dialers=dialers,
        socket_options=socket_options,
        family=family,
    )[0]


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
    limit = socket.getdefaulttimeout() if isinstance(timeout, _Default) else timeout
    check_timeout(limit)
    if all_errors and sys.version_info < (3, 11):
        raise SettingsError("all_errors = True: expected False, since Python has ExceptionGroup from 3.11 on")
    deadline = None if limit is None else time.monotonic() + limit
    dialers = dialers or shared()
    found = interleaved(resolved(address, dialers, source_address, family))
    errors: list[OSError] = []
    try:
        if len(found) == 1:
            # No race: the thread sleeps in connect().
            ((info, target),) = found
            left = limit
            if deadline is not None and limit is not None:
                left = max(MIN_LEFT, deadline - time.monotonic())
                # Each other timeout is a system call at the end.
                left = limit if left > limit - MIN_LEFT else left
            opened, report = dialers.connect(
                info, target, timeout=left, source=source_address, socket_options=socket_options
            )
        else:
            opened, report = _race(dialers, found, deadline, source_address, socket_options, errors)
        if opened.gettimeout() != limit:
            opened.settimeout(limit)
        return opened, report
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

MIN_LEFT = 0.001
"""Seconds that a dial has at least, so that one whose name was resolved too late fails with the error of a timeout."""

Found = list[tuple[tuple[int, int, int], SocketAddress]]
"""The sockets (family, type, protocol) and addresses of a host."""


def interleaved(found: Found) -> Found:
    """Returns the addresses with the families in turn, beginning with the first one (RFC 8305, section 4)."""
    if len(found) < 2:
        return found
    first = [entry for entry in found if entry[0][0] == found[0][0][0]]
    others = [entry for entry in found if entry[0][0] != found[0][0][0]]
    pairs = itertools.zip_longest(first, others)
    return [entry for pair in pairs for entry in pair if entry is not None]


class _Try:
    """A dial to one address on a non-blocking socket."""

    def __init__(
        self,
        dialers: Dialers,
        info: tuple[int, int, int],
        address: SocketAddress,
        source: tuple[str, int] | None,
        socket_options: Sequence[SocketOption],
    ) -> None:
        self._info, self._address, self._options = info, address, socket_options
        dialer = dialers.get(address, source)
        self.opened = self._open()
        try:
            self._attempt: _native.Attempt = dialer.prepare(self.opened.fileno())
            self._connect()
        except BaseException:
            self.opened.close()
            raise

    def _open(self) -> socket.socket:
        opened = open_socket(self._info, self._options)
        opened.setblocking(False)
        return opened

    def _connect(self) -> None:
        """Begins a handshake."""
        while True:
            self._begun = time.perf_counter_ns()
            try:
                self.opened.connect(self._address)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self._renew(failure(error))
            else:
                break
        self._called = time.perf_counter_ns()

    def _renew(self, code: int) -> None:
        """Prepares the socket for another connect(), or raises the error of the dial."""
        if self._attempt.failed(self.opened.fileno(), code, time.perf_counter_ns() - self._begun):
            self.opened.close()
            self.opened = self._open()
            self._attempt.renew(self.opened.fileno())

    def answered(self) -> DialReport | None:
        """Ends the dial after its handshake. Returns `None` if it goes on with another port."""
        code = self.opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == 0:
            now = time.perf_counter_ns()
            return report(self._attempt, self.opened, self._called - self._begun, now - self._called)
        self._renew(code)
        self._connect()
        return None

    def expire(self) -> None:
        """Ends the dial at its deadline."""
        self._renew(errno.ETIMEDOUT)
        raise TimeoutError(errno.ETIMEDOUT, f"{self._address[0]} did not answer in time")


def _race(
    dialers: Dialers,
    found: Found,
    deadline: float | None,
    source: tuple[str, int] | None,
    socket_options: Sequence[SocketOption],
    errors: list[OSError],
) -> tuple[socket.socket, DialReport]:
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
                info, address = rest.pop(0)
                try:
                    pending.append(_Try(dialers, info, address, source, socket_options))
                except OSError as error:
                    errors.append(error)
                following = time.monotonic() + DELAY
                continue
            ends = [end for end in (deadline, following if rest else None) if end is not None]
            for one in _writable(pending, min(ends) - now if ends else None):
                try:
                    if (found_report := one.answered()) is not None:
                        pending.remove(one)
                        return one.opened, found_report
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


def resolved(
    address: tuple[str | None, int],
    dialers: Dialers,
    source_address: tuple[str, int] | None,
    family: int = socket.AF_UNSPEC,
) -> Found:
    """Returns the sockets and addresses of a host, of one family or of those that the sources can reach."""
    if family == socket.AF_UNSPEC:
        family = dialers.family
    if source_address is not None and source_address[0]:
        family = socket.AF_INET6 if ":" in source_address[0] else socket.AF_INET
    host, port = address
    found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    return [((entry[0], entry[1], entry[2]), target(entry[4])) for entry in found]


def target(address: tuple[object, ...]) -> SocketAddress:
    """Returns an address of `socket.getaddrinfo()` with its type."""
    if len(address) in (2, 4) and isinstance(address[0], str) and all(isinstance(part, int) for part in address[1:]):
        return cast(SocketAddress, address)
    raise ValueError(f"{address!r} is not an address of AF_INET or AF_INET6")
