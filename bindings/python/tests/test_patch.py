"""`patch()`: other libraries over the sockets of fourtuple, with what they accept, return and raise."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import os
import select
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import fourtuple
import fourtuple.aio
import fourtuple.requests
import httpx
import pytest
import requests
import urllib3
import urllib3.util.connection
from conftest import HIGH, HOST, LOW, PORT, PORTS
from fourtuple import Dialers
from server import Server

DESTINATION = ("127.0.0.1", 9000)
# A destination whose route is prohibited: EACCES.
PROHIBITED = ("198.51.100.1", 9)


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    """Ends a patch that a failed test leaves."""
    yield
    fourtuple.unpatch()


def with_http_client(url: str) -> str:
    connection = http.client.HTTPConnection(url.split("/")[2], timeout=60)
    connection.request("GET", "/")
    page = connection.getresponse().read().decode()
    connection.close()
    return page


def with_urllib(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as response:
        return str(response.read().decode())


def with_requests(url: str) -> str:
    with requests.Session() as session:
        return session.get(url, timeout=60).text


def with_urllib3(url: str) -> str:
    with urllib3.PoolManager() as pools:
        return pools.request("GET", url, timeout=60, retries=False).data.decode()


def with_streams(url: str) -> str:
    async def get() -> str:
        host, port = url.split("/")[2].rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        page = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
        return page.rpartition("\r\n")[2]

    return asyncio.run(get())


def with_async_httpx(url: str) -> str:
    async def get() -> str:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            return (await client.get(url)).text

    return asyncio.run(get())


def with_aiohttp(url: str) -> str:
    async def get() -> str:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return await response.text()

    return asyncio.run(get())


Get = Callable[[str], str]
CLIENTS: list[Get] = [
    with_http_client,
    with_urllib,
    with_requests,
    with_urllib3,
    with_streams,
    with_async_httpx,
    with_aiohttp,
]
clients = pytest.mark.parametrize("get", CLIENTS)


def source(page: str) -> str:
    return page.split()[0]


@clients
def test_a_patched_library_uses_the_sources_of_the_dialers(server: Server, get: Get) -> None:
    with fourtuple.patch(Dialers(sources="127.0.0.77")):
        assert source(get(server.url())) == "127.0.0.77"
    assert source(get(server.url())) == "127.0.0.1"


@clients
def test_a_patched_library_finds_the_last_port_and_names_the_cause(server: Server, get: Get) -> None:
    held = [fourtuple.create_connection(server.address) for _ in range(PORTS - 1)]
    with fourtuple.patch():
        assert LOW <= int(get(server.url()).split()[1]) <= HIGH
        # The side that closed first holds the last port in TIME_WAIT, and that may be the server.
        with contextlib.suppress(fourtuple.PortsExhausted):
            held.append(fourtuple.create_connection(server.address))
        with pytest.raises(Exception) as raised:
            get(server.url())
    assert isinstance(fourtuple.dial_error(raised.value), fourtuple.PortsExhausted)
    for opened in held:
        opened.close()


@clients
def test_a_silent_address_delays_no_patched_library(server: Server, hosts: None, get: Get) -> None:
    # Without the option asyncio tries one address after the other, as it does without the patch.
    if get is with_streams:
        pytest.skip("asyncio.open_connection() needs happy_eyeballs_delay, see the next test")
    with fourtuple.patch():
        assert source(get(f"http://{HOST}:{PORT}/")) == "127.0.0.1"


def test_asyncio_keeps_its_happy_eyeballs(server: Server, hosts: None) -> None:
    async def dial() -> str:
        _, writer = await asyncio.open_connection(HOST, PORT, happy_eyeballs_delay=0.05)
        peer = str(writer.get_extra_info("peername")[0])
        writer.close()
        return peer

    with fourtuple.patch():
        assert asyncio.run(dial()) == "127.0.0.1"


def originals() -> list[object]:
    loop: Any = asyncio.selector_events.BaseSelectorEventLoop
    return [socket.create_connection, loop.sock_connect, urllib3.util.connection.create_connection]


def test_the_end_of_a_patch_restores_every_function() -> None:
    before = originals()
    patch = fourtuple.patch()
    assert len(patch.names) == 3
    assert not any(function in before for function in originals())
    with pytest.raises(RuntimeError, match="unpatch"):
        fourtuple.patch()
    patch.unpatch()
    assert originals() == before and patch.names == []
    with fourtuple.patch():
        pass
    assert originals() == before
    fourtuple.patch()
    fourtuple.unpatch()
    fourtuple.unpatch()
    assert originals() == before


def test_a_function_that_another_library_replaced_stays(listener: socket.socket) -> None:
    original = socket.create_connection
    patch = fourtuple.patch(Dialers(sources="127.0.0.77"))
    ours = socket.create_connection

    def theirs(*given: Any) -> socket.socket:
        return ours(*given)

    socket.create_connection = theirs  # type: ignore[assignment]
    try:
        patch.unpatch()
        assert socket.create_connection is theirs
        with socket.create_connection(DESTINATION) as opened:
            assert opened.getsockname()[0] == "127.0.0.1", "the patch has ended"
    finally:
        socket.create_connection = original


def test_a_source_address_is_used_and_shares_ports(listener: socket.socket) -> None:
    with socket.socket() as second, fourtuple.patch():
        second.bind(("127.0.0.1", 9001))
        second.listen(4096)
        held = [socket.create_connection(DESTINATION, 60, ("127.0.0.7", 0)) for _ in range(PORTS)]
        # bind() of the standard library finds no port here.
        held.append(socket.create_connection(("127.0.0.1", 9001), source_address=("127.0.0.7", 0)))
        held.append(socket.create_connection(DESTINATION, source_address=("localhost", 0)))
        names = [opened.getsockname()[0] for opened in held]
        assert names == ["127.0.0.7"] * (PORTS + 1) + ["127.0.0.1"]
        for opened in held:
            opened.close()


def test_asyncio_keeps_local_addr_and_bound_sockets(listener: socket.socket) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(asyncio.Protocol, *DESTINATION, local_addr=("127.0.0.8", 0))
        assert transport.get_extra_info("sockname")[0] == "127.0.0.8"
        transport.close()
        with socket.socket() as opened:
            opened.bind(("127.0.0.1", 45_000))
            opened.setblocking(False)
            await loop.sock_connect(opened, DESTINATION)
            assert opened.getsockname() == ("127.0.0.1", 45_000)

    with fourtuple.patch(Dialers(sources="127.0.0.77")):
        asyncio.run(run())


def test_a_new_socket_keeps_the_options_of_the_caller(listener: socket.socket) -> None:
    wanted: list[Any] = [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 77),
        (socket.SOL_SOCKET, socket.SO_RCVBUF, 20_000),
        (socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo"),
    ]
    inodes: list[tuple[int, int]] = []

    async def dial() -> socket.socket:
        opened = socket.socket()
        opened.setblocking(False)
        for option in wanted:
            opened.setsockopt(*option)
        before, descriptor = inode(opened), opened.fileno()
        await asyncio.get_running_loop().sock_connect(opened, DESTINATION)
        inodes.append((before, inode(opened)))
        assert opened.fileno() == descriptor and opened.gettimeout() == 0
        for level, name, value in wanted[:3]:
            assert opened.getsockopt(level, name) == value
        assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 40_000
        assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0") == b"lo"
        return opened

    async def run() -> None:
        for opened in [await dial() for _ in range(PORTS * 3 // 4)]:
            opened.close()

    with fourtuple.patch(Dialers(strategy="select-test-repeat", device="lo")):
        asyncio.run(run())
    assert any(before != after for before, after in inodes), "48 draws of 64 ports repeat one"


def inode(opened: socket.socket) -> int:
    return os.fstat(opened.fileno()).st_ino


def failures(connect: Callable[[], object]) -> tuple[bool, ...]:
    """The classes by which programs tell the errors of a connect() apart."""
    with pytest.raises(OSError) as raised:
        connect()
    kinds = (ConnectionRefusedError, socket.timeout, PermissionError, socket.gaierror, BlockingIOError)
    return tuple(isinstance(raised.value, kind) for kind in kinds)


def async_dial(address: tuple[str, int]) -> None:
    async def dial() -> None:
        _, writer = await asyncio.open_connection(*address)
        writer.close()

    asyncio.run(dial())


@pytest.mark.parametrize(
    "connect",
    [
        lambda: socket.create_connection(("127.0.0.1", 9), 60),
        lambda: socket.create_connection(PROHIBITED, 60),
        lambda: socket.create_connection(DESTINATION, 0.1),
        lambda: socket.create_connection(DESTINATION, 0),
        lambda: socket.create_connection(("nowhere.invalid", 9), 60),
        lambda: socket.create_connection(("127.0.0.1", 9), 60, ("203.0.113.1", 0)),
        lambda: async_dial(("127.0.0.1", 9)),
        lambda: async_dial(PROHIBITED),
    ],
    ids=["refused", "denied", "timeout", "nonblocking", "name", "source", "asyncio-refused", "asyncio-denied"],
)
def test_errors_have_the_classes_of_the_standard_library(connect: Callable[[], object]) -> None:
    subprocess.run(["ip", "route", "add", "prohibit", PROHIBITED[0]], check=True)
    with socket.socket() as full:
        full.bind(DESTINATION)
        full.listen(0)
        with socket.create_connection(DESTINATION, 60):
            # The kernel may return before the listener has received the ACK.
            select.select([full], [], [])
            expected = failures(connect)
            with fourtuple.patch():
                assert failures(connect) == expected


@pytest.mark.skipif(sys.version_info < (3, 11), reason="ExceptionGroup is new in Python 3.11")
def test_all_errors_are_a_group_also_of_one() -> None:
    with fourtuple.patch(), pytest.raises(ExceptionGroup) as raised:  # noqa: F821
        socket.create_connection(("127.0.0.1", 9), all_errors=True)
    assert [error.errno for error in raised.value.exceptions] == [errno.ECONNREFUSED]  # type: ignore[union-attr]


def test_default_timeouts_are_kept(listener: socket.socket) -> None:
    socket.setdefaulttimeout(30)
    try:
        with fourtuple.patch():
            cases: list[tuple[Any, Any]] = [((), 30), ((None,), None), ((5,), 5)]
            for given, expected in cases:
                with socket.create_connection(DESTINATION, *given) as opened:
                    assert opened.gettimeout() == expected
            connection = http.client.HTTPConnection(*DESTINATION)
            connection.connect()
            assert connection.sock.gettimeout() == 30
            connection.close()
    finally:
        socket.setdefaulttimeout(None)


def test_urllib3_keeps_its_options_and_its_family(
    server: Server,
    hosts: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dialed = urllib3.util.connection.create_connection
    with fourtuple.patch():
        assert urllib3.util.connection.create_connection is not dialed
        # The usual way to keep programs from IPv6.
        monkeypatch.setattr(urllib3.util.connection, "allowed_gai_family", lambda: socket.AF_INET)
        options: Any = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
        with urllib3.util.connection.create_connection((HOST, PORT), 60, socket_options=options) as opened:
            assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert opened.getpeername()[0] == "127.0.0.1"
        monkeypatch.setattr(urllib3.util.connection, "allowed_gai_family", lambda: socket.AF_INET6)
        with pytest.raises(TimeoutError):
            urllib3.util.connection.create_connection((HOST, PORT), 1)


def test_an_adapter_keeps_the_family_of_urllib3(
    server: Server,
    hosts: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(urllib3.util.connection, "allowed_gai_family", lambda: socket.AF_INET6)
    with fourtuple.requests.session() as session, pytest.raises(requests.ConnectTimeout):
        session.get(f"http://{HOST}:{PORT}/", timeout=1)


def test_a_cancelled_connect_leaves_the_socket_to_its_owner() -> None:
    async def run() -> None:
        with socket.socket() as full, socket.socket() as opened:
            full.bind(DESTINATION)
            full.listen(0)
            opened.setblocking(False)
            first = await fourtuple.aio.create_connection(DESTINATION, 60)
            select.select([full], [], [])
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.get_running_loop().sock_connect(opened, DESTINATION), 0.1)
            assert opened.fileno() >= 0
            first.close()

    with fourtuple.patch():
        asyncio.run(run())


@pytest.mark.parametrize("address", [("localhost", 9000), (b"127.0.0.1", 9000), ("127.0.0.1", "9000")])
def test_an_address_is_resolved_for_a_socket_of_asyncio(listener: socket.socket, address: Any) -> None:
    async def run() -> None:
        with socket.socket() as opened:
            opened.setblocking(False)
            await asyncio.get_running_loop().sock_connect(opened, address)
            assert opened.getpeername() == DESTINATION

    asyncio.run(run())
    with fourtuple.patch():
        asyncio.run(run())


def test_a_socket_of_ipv6_is_connected_with_two_parts_or_four() -> None:
    async def run(address: Any) -> None:
        with socket.socket(socket.AF_INET6) as opened:
            opened.setblocking(False)
            await asyncio.get_running_loop().sock_connect(opened, address)
            assert opened.getpeername()[:2] == ("::1", 9000)

    with fourtuple.patch(), socket.socket(socket.AF_INET6) as listener:
        listener.bind(("::1", 9000))
        listener.listen(10)
        for address in ("::1", 9000), ("::1", 9000, 0, 0), ("0::1", 9000, 0, 0):
            asyncio.run(run(address))
