"""httpx (0.28) and httpcore (1)."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import anyio
import anyio.abc
import anyio.to_thread
import httpcore
import httpx

# The streams of httpcore do TLS, also inside of TLS, and map errors. httpcore exports the backends but not their streams.
from httpcore._backends.anyio import AnyIOStream
from httpcore._backends.sync import SyncStream

from fourtuple import aio
from fourtuple.connect import DELAY, create_connection
from fourtuple.dialers import Dialers, SocketOption, shared

__all__ = ["AsyncNetworkBackend", "AsyncTransport", "NetworkBackend", "Transport"]

T = TypeVar("T")

_NODELAY: SocketOption = (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class NetworkBackend(httpcore.SyncBackend):
    """A network backend for `httpcore.ConnectionPool`. Sets options before connect()."""

    def __init__(self, dialers: Dialers | None = None) -> None:
        self._dialers = dialers or shared()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Opens a connection."""
        source = None if local_address is None else (local_address, 0)
        _require_time(host, port, timeout)
        try:
            opened = create_connection(
                (host, port),
                timeout,
                source,
                dialers=self._dialers,
                socket_options=(*(socket_options or ()), _NODELAY),
            )
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        return SyncStream(opened)


class _Anyio:
    async def run(self, function: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(function)

    async def resolve(self, function: Callable[[], T], seconds: float | None) -> T:
        with anyio.fail_after(seconds):
            return await anyio.to_thread.run_sync(function, abandon_on_cancel=True)

    async def race(self, dials: Sequence[aio.Dial], errors: list[OSError]) -> aio.Dialed:
        connected: list[aio.Dialed] = []
        wrong: list[Exception] = []

        async def run(dial: aio.Dial, ended: anyio.Event) -> None:
            try:
                connected.append(await dial())
                group.cancel_scope.cancel()
            except OSError as error:
                errors.append(error)
            except Exception as error:
                # A task group would raise it as an ExceptionGroup.
                wrong.append(error)
                group.cancel_scope.cancel()
            finally:
                ended.set()

        try:
            async with anyio.create_task_group() as group:
                for dial in dials:
                    ended = anyio.Event()
                    group.start_soon(run, dial, ended)
                    with anyio.move_on_after(DELAY):
                        await ended.wait()
            if wrong:
                raise wrong[0]
        except BaseException:
            for opened, _ in connected:
                opened.close()
            raise
        for opened, _ in connected[1:]:
            opened.close()
        return aio.first(connected, errors)

    async def writable(self, opened: socket.socket, seconds: float | None) -> bool:
        with anyio.move_on_after(seconds) as scope:
            await anyio.wait_writable(opened)
        return not scope.cancelled_caught


class AsyncNetworkBackend(httpcore.AnyIOBackend):
    """A network backend for `httpcore.AsyncConnectionPool` on asyncio or trio. Sets options before connect()."""

    def __init__(self, dialers: Dialers | None = None) -> None:
        self._dialers = dialers or shared()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Opens a connection."""
        source = None if local_address is None else (local_address, 0)
        options = (*(socket_options or ()), _NODELAY)
        _require_time(host, port, timeout)
        try:
            opened, _ = await aio.connect_host(_Anyio(), (host, port), timeout, source, self._dialers, options, False)
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(str(error) or f"{host}:{port}: {timeout} s") from error
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        try:
            return AnyIOStream(await anyio.abc.SocketStream.from_socket(opened))
        except BaseException:
            opened.close()
            raise


class Transport(httpx.HTTPTransport):
    """A transport of `httpx.Client` whose connections choose their source ports.

    `settings` are those of `httpx.HTTPTransport`. `dialers`: as for `create_connection()`.
    """

    def __init__(self, dialers: Dialers | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        _use(self._pool, NetworkBackend(dialers))


class AsyncTransport(httpx.AsyncHTTPTransport):
    """A transport of `httpx.AsyncClient` whose connections choose their source ports; see `Transport`."""

    def __init__(self, dialers: Dialers | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        _use(self._pool, AsyncNetworkBackend(dialers))


def _require_time(host: str, port: int, timeout: float | None) -> None:
    """Raises the error of a timeout without time, as httpcore does."""
    if timeout is not None and timeout <= 0:
        raise httpcore.ConnectTimeout(f"{host}:{port}: {timeout} s")


def _use(pool: Any, backend: NetworkBackend | AsyncNetworkBackend) -> None:
    """Sets the backend of a pool. httpx makes the pool and has no argument for it."""
    if not hasattr(pool, "_network_backend"):
        raise TypeError(
            f"{type(pool).__name__} of this httpcore has no network backend to set; "
            "pass NetworkBackend to a httpcore.ConnectionPool of your own"
        )
    pool._network_backend = backend
