"""Connections for asyncio. Long calls run on threads, so that the event loop never waits for a search of ports.

The dial itself needs two things of an event loop, `run` and `writable`; `fourtuple.httpx` has them for anyio.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import ipaddress
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Protocol, TypeVar

from fourtuple import _native
from fourtuple.connect import DELAY, MIN_LEFT, Found, interleaved, resolved
from fourtuple.dialers import (
    Dialers,
    DialReport,
    SocketAddress,
    SocketOption,
    check_timeout,
    failure,
    open_socket,
    replace,
    report,
    shared,
)

__all__ = ["create_connection", "dial", "open_connection"]

T = TypeVar("T")

Dial = Callable[[], Coroutine[object, object, tuple[socket.socket, DialReport]]]
"""Begins a dial to one address."""


class Loop(Protocol):
    """The parts of an event loop that a dial needs."""

    async def run(self, function: Callable[[], T]) -> T:
        """Runs a function on another thread. A cancelled caller waits for its end, which is milliseconds away."""

    async def resolve(self, function: Callable[[], T], seconds: float | None) -> T:
        """Runs a function on another thread, and raises `TimeoutError` after this time. The thread may end later."""

    async def writable(self, opened: socket.socket, seconds: float | None) -> bool:
        """Waits until a socket is writable; returns false after this time."""

    async def race(self, dials: Sequence[Dial], errors: list[OSError]) -> tuple[socket.socket, DialReport]:
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

    async def race(self, dials: Sequence[Dial], errors: list[OSError]) -> tuple[socket.socket, DialReport]:
        rest = list(dials)
        pending: set[asyncio.Task[tuple[socket.socket, DialReport]]] = set()
        connected: list[tuple[socket.socket, DialReport]] = []
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

        def wake(is_writable: bool) -> None:
            if not ready.done():
                ready.set_result(is_writable)

        timer = None if seconds is None else loop.call_later(seconds, wake, False)
        # With the socket asyncio would format its addresses into an error that nobody sees.
        descriptor = opened.fileno()
        loop.add_writer(descriptor, wake, True)
        try:
            return await ready
        finally:
            loop.remove_writer(descriptor)
            if timer is not None:
                timer.cancel()


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
    return (await dial(address, timeout, source_address, dialers=dialers, socket_options=socket_options))[0]


async def dial(
    address: tuple[str | None, int],
    timeout: float | None = None,
    source_address: tuple[str, int] | None = None,
    *,
    dialers: Dialers | None = None,
    socket_options: Sequence[SocketOption] = (),
) -> tuple[socket.socket, DialReport]:
    """Connects like `create_connection()`, and returns the report too."""
    dialers = dialers or shared("short-first")
    return await connect_host(_Asyncio(), address, timeout, source_address, dialers, socket_options)


async def connect_host(
    loop: Loop,
    address: tuple[str | None, int],
    timeout: float | None,
    source: tuple[str, int] | None,
    dialers: Dialers,
    socket_options: Sequence[SocketOption],
) -> tuple[socket.socket, DialReport]:
    """Resolves a host and dials its addresses with Happy Eyeballs (RFC 8305). `timeout` limits all of it together."""
    check_timeout(timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    found = interleaved(await resolve(loop, address, dialers, source, timeout))
    if not found:
        raise OSError(f"getaddrinfo({address[0]!r}) returned no address")
    errors: list[OSError] = []

    async def begin(info: tuple[int, int, int], entry: SocketAddress) -> tuple[socket.socket, DialReport]:
        if errors and deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(errno.ETIMEDOUT, f"{entry[0]} was not dialed: no time was left")
        return await connect(loop, dialers, info, entry, deadline, source, socket_options)

    dials = [functools.partial(begin, info, entry) for info, entry in found]
    if len(dials) == 1:
        return await dials[0]()
    try:
        return await loop.race(dials, errors)
    finally:
        # The traceback of an error refers to this frame.
        errors.clear()


def first(connected: list[tuple[socket.socket, DialReport]], errors: list[OSError]) -> tuple[socket.socket, DialReport]:
    """Returns the first connection, or raises the first error."""
    if connected:
        return connected[0]
    raise errors[0]


def _collect(
    done: Iterable[asyncio.Task[tuple[socket.socket, DialReport]]],
    connected: list[tuple[socket.socket, DialReport]],
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


async def resolve(
    loop: Loop,
    address: tuple[str | None, int],
    dialers: Dialers,
    source: tuple[str, int] | None,
    timeout: float | None,
) -> Found:
    """Resolves a host on another thread, and an IP address at once."""
    try:
        ipaddress.ip_address(address[0] or "")
    except ValueError:
        return await loop.resolve(lambda: resolved(address, dialers, source), timeout)
    return resolved(address, dialers, source)


async def connect(
    loop: Loop,
    dialers: Dialers,
    info: tuple[int, int, int],
    address: SocketAddress,
    deadline: float | None,
    source: tuple[str, int] | None,
    socket_options: Sequence[SocketOption],
) -> tuple[socket.socket, DialReport]:
    """Dials one address on an event loop. `deadline`, of `time.monotonic()`, limits the handshake."""
    opened = open_socket(info, socket_options)
    try:
        opened.setblocking(False)
        return opened, await connect_socket(loop, dialers, opened, address, deadline, source, lambda: socket_options)
    except BaseException:
        opened.close()
        raise


async def connect_socket(
    loop: Loop,
    dialers: Dialers,
    opened: socket.socket,
    address: SocketAddress,
    deadline: float | None,
    source: tuple[str, int] | None,
    socket_options: Callable[[], Sequence[SocketOption]],
) -> DialReport:
    """Connects a non-blocking socket. If the dial needs a new socket, it gets `socket_options` and the same descriptor."""
    dialer = None if source is not None else dialers.cached(address)
    if dialer is None:
        dialer = await loop.run(lambda: dialers.get(address, source))
    attempt = dialer.prepare(opened.fileno())
    while True:
        begun = time.perf_counter_ns()
        code = await _connect_call(loop, attempt, opened, address)
        called = time.perf_counter_ns()
        if code == errno.EINPROGRESS:
            left = None if deadline is None else max(MIN_LEFT, deadline - time.monotonic())
            is_answered = await loop.writable(opened, left)
            code = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if is_answered else errno.ETIMEDOUT
        now = time.perf_counter_ns()
        if code == 0:
            return report(attempt, opened, called - begun, now - called)
        # The census of a failed dial lists all sockets.
        failed = functools.partial(attempt.failed, opened.fileno(), code, now - begun)
        if await loop.run(failed):
            replace(opened, socket_options())
            attempt.renew(opened.fileno())


async def _connect_call(loop: Loop, attempt: _native.Attempt, opened: socket.socket, address: SocketAddress) -> int:
    """Calls connect() and returns 0 if the handshake has ended, EINPROGRESS if it has begun, else the errno."""

    def call() -> int:
        try:
            opened.connect(address)
        except (BlockingIOError, InterruptedError):
            return errno.EINPROGRESS
        except OSError as error:
            return failure(error)
        return 0

    return await loop.run(call) if attempt.searches_for_long else call()
