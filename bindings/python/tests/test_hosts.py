"""Hosts with an address that does not answer, and children of fork(), for every adapter."""

from __future__ import annotations

import asyncio
import os
import pathlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import fourtuple
import fourtuple.aio
import fourtuple.aiohttp
import fourtuple.connect
import fourtuple.httpx
import fourtuple.requests
import httpx
import pytest
import trio
from conftest import HOST, PORT
from fourtuple import Dialers
from server import Server
from test_http import CLIENTS, Get, async_httpx


@pytest.mark.parametrize("get", CLIENTS)
def test_a_silent_address_delays_no_client(server: Server, hosts: None, get: Get) -> None:
    begun = time.monotonic()
    assert get(f"http://{HOST}:{PORT}/", Dialers()).startswith("127.0.0.1")
    # The clients have a timeout of 60 s, and the kernel gives up after 2 minutes.
    assert time.monotonic() - begun < 30


def test_the_second_address_follows_the_wait_in_connect(
    server: Server, hosts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    writable = fourtuple.connect._writable

    def counted(pending: Any, seconds: float | None) -> Any:
        waits.append(len(pending))
        return writable(pending, seconds)

    monkeypatch.setattr(fourtuple.connect, "_writable", counted)
    fourtuple.create_connection((HOST, PORT), 60).close()
    # No second wait for the silent address alone.
    assert 1 not in waits


def dial(timeout: float) -> None:
    fourtuple.create_connection(("silent.test", PORT), timeout).close()


def aio_dial(timeout: float) -> None:
    asyncio.run(fourtuple.aio.dial(("silent.test", PORT), timeout))


def with_httpx(timeout: float) -> None:
    with httpx.Client(transport=fourtuple.httpx.Transport(), trust_env=False, timeout=timeout) as client:
        client.get(f"http://silent.test:{PORT}/")


def with_requests(timeout: float) -> None:
    with fourtuple.requests.session() as session:
        session.get(f"http://silent.test:{PORT}/", timeout=timeout)


def on_asyncio(timeout: float) -> None:
    asyncio.run(async_httpx(f"http://silent.test:{PORT}/", None, timeout))


def on_trio(timeout: float) -> None:
    trio.run(async_httpx, f"http://silent.test:{PORT}/", None, timeout)


@pytest.mark.parametrize("connect", [dial, aio_dial, with_httpx, on_asyncio, on_trio, with_requests])
def test_one_deadline_holds_for_all_addresses(
    hosts: None, monkeypatch: pytest.MonkeyPatch, connect: Callable[[float], None]
) -> None:
    opened: list[socket.socket] = []
    for module in fourtuple.aio, fourtuple.connect:

        def noted(*given: Any, real: Any = module.open_socket) -> socket.socket:
            opened.append(real(*given))
            return opened[-1]

        monkeypatch.setattr(module, "open_socket", noted)
    begun = time.monotonic()
    with pytest.raises(Exception) as raised:
        connect(2)
    assert isinstance(fourtuple.dial_error(raised.value), fourtuple.TimedOut)
    # 40 addresses with 2 s each take 80 s. The first comes late on a busy host, and one follows each 250 ms.
    assert time.monotonic() - begun < 20
    assert 1 < len(opened) < 40, "none after the deadline"
    assert all(one.fileno() == -1 for one in opened)


def race_on_asyncio(backend: fourtuple.httpx.AsyncNetworkBackend, host: str, options: Any) -> None:
    asyncio.run(connect_and_close(backend, host, options))


def race_on_trio(backend: fourtuple.httpx.AsyncNetworkBackend, host: str, options: Any) -> None:
    trio.run(connect_and_close, backend, host, options)


async def connect_and_close(backend: fourtuple.httpx.AsyncNetworkBackend, host: str, options: Any) -> None:
    stream = await backend.connect_tcp(host, PORT, 60, socket_options=options)
    await stream.aclose()


@pytest.mark.parametrize("race", [race_on_asyncio, race_on_trio])
def test_wrong_options_are_told_in_a_race(hosts: None, race: Callable[..., None]) -> None:
    with pytest.raises(TypeError):
        race(fourtuple.httpx.AsyncNetworkBackend(), HOST, [("level", "name", 1)])


def test_a_cancelled_race_closes_its_connection() -> None:
    async def race() -> socket.socket:
        opened, connected = socket.socket(), asyncio.Event()

        async def dial() -> Any:
            connected.set()
            return opened, None

        async def silent() -> Any:
            await asyncio.Event().wait()

        task = asyncio.create_task(fourtuple.aio._Asyncio().race([dial, silent], []))
        # The dial has ended, and the race has not seen its end.
        await connected.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return opened

    assert asyncio.run(race()).fileno() == -1


def test_wrong_options_leave_no_socket_of_a_factory() -> None:
    wrong: Any = (("level", "name", 1),)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TypeError) as raised:
        fourtuple.SocketFactory(socket_options=wrong)((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 9)))
    # The traceback keeps the socket alive.
    assert len(os.listdir("/proc/self/fd")) == before and raised.traceback


def test_the_losers_of_a_race_are_closed(server: Server, hosts: None, recwarn: pytest.WarningsRecorder) -> None:
    def handshakes() -> int:
        lines = pathlib.Path("/proc/thread-self/net/tcp6").read_text().splitlines()[1:]
        return sum(line.split()[3] == "02" for line in lines)

    for _ in range(3):
        asyncio.run(fourtuple.aio.dial((HOST, PORT), 60))[0].close()
        assert handshakes() == 0
        fourtuple.create_connection((HOST, PORT), 60).close()
        assert handshakes() == 0
        for race in race_on_asyncio, race_on_trio:
            race(fourtuple.httpx.AsyncNetworkBackend(), HOST, ())
            assert handshakes() == 0
    assert not [warning for warning in recwarn if issubclass(warning.category, ResourceWarning)]


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_without_time_is_refused(timeout: float) -> None:
    for connect in (dial, aio_dial):
        with pytest.raises(fourtuple.SettingsError, match="above 0"):
            connect(timeout)


def test_errors_have_the_words_of_the_kernel(listener: socket.socket) -> None:
    with pytest.raises(fourtuple.Refused, match="Connection refused"):
        fourtuple.create_connection(("127.0.0.1", 9))
    held: list[socket.socket] = []
    with pytest.raises(fourtuple.PortsExhausted, match="Cannot assign requested address"):
        while True:
            held.append(fourtuple.create_connection(("127.0.0.1", 9000)))
    for opened in held:
        opened.close()


def makers() -> list[Dialers]:
    """Dialers of a program, and those that the adapters share."""
    adapters = fourtuple.requests.Adapter(), fourtuple.httpx.NetworkBackend(), fourtuple.httpx.AsyncNetworkBackend()
    assert {adapter._dialers for adapter in adapters} == {fourtuple.dialers.shared()}
    return [Dialers(), fourtuple.SocketFactory().dialers, fourtuple.dialers.shared()]


def test_a_child_of_fork_has_locks_and_caches_of_its_own(listener: socket.socket) -> None:
    all_dialers = makers()
    for dialers in all_dialers:
        fourtuple.create_connection(("127.0.0.1", 9000), dialers=dialers).close()
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        # Another thread has every lock at the time of the fork.
        for dialers in all_dialers:
            dialers._lock.acquire()
        held.set()
        release.wait()
        for dialers in all_dialers:
            dialers._lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            is_fresh = all(not dialers._lock.locked() and dialers.destinations == 0 for dialers in all_dialers)
            if is_fresh:
                for dialers in all_dialers:
                    fourtuple.create_connection(("127.0.0.1", 9000), dialers=dialers).close()
                code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(process, 0)
    release.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
    assert all(dialers.destinations == 1 for dialers in all_dialers), "the parent keeps its dialers"
