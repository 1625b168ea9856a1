"""Connections for asyncio. Long calls run on threads, so that the event loop never waits for a search of ports.

The dial itself needs two things of an event loop, `run` and `writable`; `fourtuple.httpx` has them for anyio.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Protocol, TypeVar

from fourtuple import _native
from fourtuple.connect import DELAY, interleaved, lookup, numeric, reached
from fourtuple.dialers import (
    MIN_LEFT,
    AddressInfo,
    Dialers,
    DialReport,
    SocketAddress,
    SocketOption,
    check_timeout,
    open_socket,
    replace,
    report,
    shared,
)

__all__ = ["create_connection", "dial", "open_connection"]

T = TypeVar("T")

Dialed = tuple[socket.socket, _native.Attempt]
"""A connection, and the end of its dial."""

Dial = Callable[[], Coroutine[object, object, Dialed]]
"""Begins a dial to one address."""


class Loop(Protocol):
    """The parts of an event loop that a dial needs."""

    async def run(self, function: Callable[[], T]) -> T:
        """Runs a function on another thread. A cancelled caller waits for its end, which is milliseconds away."""

    async def resolve(self, function: Callable[[], T], seconds: float | None) -> T:
        """Runs a function on another thread, and raises `TimeoutError` after this time. The thread may end later."""

    async def writable(self, opened: socket.socket, seconds: float | None) -> bool:
        """Waits until a socket is writable; returns false after this time."""

    async def race(self, dials: Sequence[Dial], errors: list[OSError]) -> Dialed:
        """Begins the dials one after the other, `DELAY` seconds apart or after a failure, and returns the first connection. Adds the
        error of each dial, and raises the first one if all fail."""


class _Asyncio:
    async def run(self, function: Callable[[], T]) -> T:
        future = asyncio.get_running_loop().run_in_executor(None, function)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # The thread uses the socket that the caller is about to close.
            while not future.done():
                await asyncio.wait([future])
            future.exception()
            raise

    async def resolve(self, function: Callable[[], T], seconds: float | None) -> T:
        future = asyncio.get_running_loop().run_in_executor(None, function)
        try:
            done, _ = await asyncio.wait([future], timeout=seconds)
        finally:
            future.cancel()
        if not done:
            raise TimeoutError(errno.ETIMEDOUT, f"the name was not resolved in {seconds} s")
        return future.result()

    async def race(self, dials: Sequence[Dial], errors: list[OSError]) -> Dialed:
        rest = list(dials)
        pending: set[asyncio.Task[Dialed]] = set()
        connected: list[Dialed] = []
        try:
            while (rest or pending) and not connected:
                if rest:
                    pending.add(asyncio.create_task(rest.pop(0)()))
                done, pending = await asyncio.wait(
                    pending, timeout=DELAY if rest else None, return_when=asyncio.FIRST_COMPLETED
                )
                _collect(done, connected, errors)
            won = first(connected, errors)
            connected.remove(won)
            return won
        finally:
            for task in pending:
                task.cancel()
            if pending:
                late, _ = await asyncio.wait(pending)
                _collect((task for task in late if not task.cancelled()), connected, [])
            # A cancelled caller takes no connection.
            for opened, _ in connected:
                opened.close()

    async def writable(self, opened: socket.socket, seconds: float | None) -> bool:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[bool] = loop.create_future()
        timer = None if seconds is None else loop.call_later(seconds, _wake, ready, False)
        # With the socket asyncio would format its addresses into an error that nobody sees.
        descriptor = opened.fileno()
        loop.add_writer(descriptor, _wake, ready, True)
        try:
            return await ready
        finally:
            loop.remove_writer(descriptor)
            if timer is not None:
                timer.cancel()


def _wake(ready: asyncio.Future[bool], is_writable: bool) -> None:
    if not ready.done():
        ready.set_result(is_writable)


async def create_connection(
    address: tuple[str | None, int],
    timeout: float | None = None,
    source_address: tuple[str, int] | None = None,
    *,
    dialers: Dialers | None = None,
    socket_options: Sequence[SocketOption] = (),
) -> socket.socket:
    """Connects like `fourtuple.create_connection()`, and returns a non-blocking socket for the argument `sock` of asyncio.

    Raises `DialError`, or the errors of `loop.getaddrinfo()`.
    """
    dialers = dialers or shared()
    return (await connect_host(_Asyncio(), address, timeout, source_address, dialers, socket_options, False))[0]


async def dial(
    address: tuple[str | None, int],
    timeout: float | None = None,
    source_address: tuple[str, int] | None = None,
    *,
    dialers: Dialers | None = None,
    socket_options: Sequence[SocketOption] = (),
) -> tuple[socket.socket, DialReport]:
    """Connects like `create_connection()`, and returns the report too."""
    dialers = dialers or shared()
    opened, attempt = await connect_host(_Asyncio(), address, timeout, source_address, dialers, socket_options, True)
    return opened, report(attempt)


async def connect_host(
    loop: Loop,
    address: tuple[str | None, int],
    timeout: float | None,
    source: tuple[str, int] | None,
    dialers: Dialers,
    socket_options: Sequence[SocketOption],
    is_reported: bool,
) -> Dialed:
    """Resolves a host and dials its addresses with Happy Eyeballs (RFC 8305). `timeout` limits all of it together."""
    check_timeout(timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    host, port = address
    family = reached(dialers, source)
    if (known := numeric(host, port, family)) is not None:
        return await connect(loop, dialers, known, deadline, source, socket_options, is_reported)
    found = await loop.resolve(lambda: lookup(host, port, family), timeout)
    if not found:
        raise OSError(f"getaddrinfo({address[0]!r}) returned no address")
    errors: list[OSError] = []

    async def begin(info: AddressInfo) -> Dialed:
        if errors and deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(errno.ETIMEDOUT, f"{info[4][0]} was not dialed: no time was left")
        return await connect(loop, dialers, info, deadline, source, socket_options, is_reported)

    if len(found) == 1:
        return await begin(found[0])
    try:
        return await loop.race([functools.partial(begin, info) for info in interleaved(found)], errors)
    finally:
        # The traceback of an error refers to this frame.
        errors.clear()


def first(connected: list[Dialed], errors: list[OSError]) -> Dialed:
    """Returns the first connection, or raises the first error."""
    if connected:
        return connected[0]
    raise errors[0]


def _collect(
    done: Iterable[asyncio.Task[Dialed]],
    connected: list[Dialed],
    errors: list[OSError],
) -> None:
    for task in done:
        error = task.exception()
        if error is None:
            connected.append(task.result())
        elif isinstance(error, OSError):
            errors.append(error)
        else:
            raise error


async def open_connection(
    host: str | None,
    port: int,
    timeout: float | None = None,
    *,
    dialers: Dialers | None = None,
    **streams: object,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects and returns streams: `asyncio.open_connection()` with `sock=`. With `ssl` name `server_hostname` too."""
    opened = await create_connection((host, port), timeout, dialers=dialers)
    try:
        return await asyncio.open_connection(sock=opened, **streams)  # type: ignore[arg-type]
    except BaseException:
        opened.close()
        raise


async def connect(
    loop: Loop,
    dialers: Dialers,
    info: AddressInfo,
    deadline: float | None,
    source: tuple[str, int] | None,
    socket_options: Sequence[SocketOption],
    is_reported: bool,
) -> Dialed:
    """Dials one address on an event loop. `deadline`, of `time.monotonic()`, limits the handshake."""
    address = info[4]
    opened = open_socket(info, socket_options)
    try:
        opened.setblocking(False)
        dialer = None if source is not None else dialers.cached(address)
        if dialer is None:
            dialer = await loop.run(lambda: dialers.get(address, source))
        attempt = await connect_socket(loop, dialer, opened, address, deadline, lambda: socket_options, is_reported)
        return opened, attempt
    except BaseException:
        opened.close()
        raise


async def connect_socket(
    loop: Loop,
    dialer: _native.Dialer,
    opened: socket.socket,
    address: SocketAddress,
    deadline: float | None,
    socket_options: Callable[[], Sequence[SocketOption]],
    is_reported: bool,
) -> _native.Attempt:
    """Connects a non-blocking socket. If the dial needs a new socket, it gets `socket_options` and the same descriptor."""
    attempt = dialer.prepare(opened)
    while True:
        if attempt.searches_for_long:
            code = await loop.run(functools.partial(opened.connect_ex, address))
        else:
            code = opened.connect_ex(address)
        called = time.perf_counter_ns()
        if code in (errno.EINPROGRESS, errno.EINTR):
            left = None if deadline is None else max(MIN_LEFT, deadline - time.monotonic())
            is_answered = await loop.writable(opened, left)
            code = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if is_answered else errno.ETIMEDOUT
        if code == 0:
            attempt.finish(opened, time.perf_counter_ns() - called, is_reported)
            return attempt
        # The census of a failed dial lists all sockets.
        if await loop.run(functools.partial(attempt.failed, opened, code)):
            replace(opened, socket_options())
            attempt.renew(opened)
