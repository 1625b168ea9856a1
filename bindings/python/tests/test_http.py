"""aiohttp, requests, urllib3 and httpx with a real server."""

from __future__ import annotations

import asyncio
import copy
import pathlib
import pickle
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from typing import Any, Optional

import aiohttp
import fourtuple
import fourtuple.aiohttp
import fourtuple.httpx
import fourtuple.requests
import httpcore
import httpx
import pytest
import requests
import trio
import urllib3
from conftest import HIGH, LOW, PORTS
from fourtuple import Dialers
from server import Server

Get = Callable[[str, Optional[Dialers]], str]
"""Gets a page on a new connection, with these dialers, and returns it."""


def with_requests(url: str, dialers: Dialers | None) -> str:
    with fourtuple.requests.session(dialers) as session:
        return session.get(url, timeout=60).text


def with_urllib3(url: str, dialers: Dialers | None) -> str:
    with fourtuple.requests.pool_manager(dialers) as pools:
        return pools.request("GET", url, timeout=60, retries=False).data.decode()


def with_httpx(url: str, dialers: Dialers | None) -> str:
    with httpx.Client(transport=fourtuple.httpx.Transport(dialers), trust_env=False, timeout=60) as client:
        return client.get(url).text


def with_httpcore(url: str, dialers: Dialers | None) -> str:
    backend = fourtuple.httpx.NetworkBackend(dialers)
    with httpcore.ConnectionPool(network_backend=backend) as pool:
        return pool.request("GET", url).content.decode()


async def async_httpx(url: str, dialers: Dialers | None, timeout: float = 60) -> str:
    transport = fourtuple.httpx.AsyncTransport(dialers)
    async with httpx.AsyncClient(transport=transport, trust_env=False, timeout=timeout) as client:
        return (await client.get(url)).text


def with_async_httpx(url: str, dialers: Dialers | None) -> str:
    return asyncio.run(async_httpx(url, dialers))


def with_trio_httpx(url: str, dialers: Dialers | None) -> str:
    return trio.run(async_httpx, url, dialers)


def with_aiohttp(url: str, dialers: Dialers | None) -> str:
    async def get() -> str:
        async with aiohttp.ClientSession(connector=fourtuple.aiohttp.connector(dialers)) as session:
            async with session.get(url) as response:
                return await response.text()

    return asyncio.run(get())


CLIENTS: list[Get] = [
    with_requests,
    with_urllib3,
    with_httpx,
    with_httpcore,
    with_async_httpx,
    with_trio_httpx,
    with_aiohttp,
]
ERRORS: dict[Get, type[Exception]] = {
    with_requests: requests.ConnectionError,
    with_urllib3: urllib3.exceptions.NewConnectionError,
    with_httpx: httpx.ConnectError,
    with_httpcore: httpcore.ConnectError,
    with_async_httpx: httpx.ConnectError,
    with_trio_httpx: httpx.ConnectError,
    with_aiohttp: aiohttp.ClientConnectorError,
}

clients = pytest.mark.parametrize("get", CLIENTS)


@clients
def test_the_last_free_port_is_found_and_then_the_error_is_typed(server: Server, get: Get) -> None:
    held = [fourtuple.create_connection(server.address) for _ in range(PORTS - 1)]
    host, port = get(server.url(), None).split()
    # The client closed first, so that its port is in TIME_WAIT now.
    assert host == "127.0.0.1" and LOW <= int(port) <= HIGH
    assert int(port) not in {opened.getsockname()[1] for opened in held}
    with pytest.raises(ERRORS[get]) as raised:
        get(server.url(), None)
    error = fourtuple.dial_error(raised.value)
    assert isinstance(error, fourtuple.PortsExhausted) and error.retryable
    for opened in held:
        opened.close()


@clients
def test_connections_come_from_the_sources_of_the_dialers(server: Server, get: Get) -> None:
    assert get(server.url(), Dialers(sources="127.0.0.77")).split()[0] == "127.0.0.77"


def test_copies_of_an_adapter_have_its_settings(server: Server) -> None:
    adapter = fourtuple.requests.Adapter(Dialers(sources="127.0.0.77"))
    for copied in copy.deepcopy(adapter), pickle.loads(pickle.dumps(adapter)):
        session = requests.Session()
        session.mount("http://", copied)
        with session:
            assert session.get(server.url()).text.split()[0] == "127.0.0.77"


@clients
def test_a_refused_connection_is_found_in_the_error(get: Get) -> None:
    with pytest.raises(ERRORS[get]) as raised:
        get("http://127.0.0.1:9/", None)
    if get is with_aiohttp:
        # asyncio waits for the handshake of a socket of the factory and makes the error.
        assert isinstance(raised.value.__cause__, ConnectionRefusedError)
    else:
        assert isinstance(fourtuple.dial_error(raised.value), fourtuple.Refused)


@clients
def test_ipv6_literals_are_dialed(get: Get) -> None:
    with Server(family=socket.AF_INET6) as server:
        assert get(server.url(), None).split()[0] == "::1"


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[pathlib.Path, pathlib.Path]]:
    """A certificate of 127.0.0.1 and its key."""
    assert shutil.which("openssl"), "the tests of TLS need openssl"
    directory = tmp_path_factory.mktemp("tls")
    chain, key = directory / "chain.pem", directory / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", chain],
        check=True,
        capture_output=True,
    )
    yield chain, key


@pytest.fixture
def tls_server(namespace: None, certificate: tuple[pathlib.Path, pathlib.Path]) -> Iterator[Server]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with Server(tls=context) as running:
        yield running


def test_tls_runs_over_dialed_sockets(tls_server: Server, certificate: tuple[pathlib.Path, pathlib.Path]) -> None:
    dialers, url = Dialers(sources="127.0.0.77"), tls_server.url()
    trusted = ssl.create_default_context(cafile=str(certificate[0]))
    with fourtuple.requests.session(dialers) as session:
        found = [session.get(url, verify=str(certificate[0]), timeout=60).text]
    with httpx.Client(transport=fourtuple.httpx.Transport(dialers, verify=trusted), timeout=60) as client:
        found.append(client.get(url).text)

    async def get() -> None:
        transport = fourtuple.httpx.AsyncTransport(dialers, verify=trusted)
        async with httpx.AsyncClient(transport=transport, timeout=60) as inner:
            found.append((await inner.get(url)).text)
        async with aiohttp.ClientSession(connector=fourtuple.aiohttp.connector(dialers, ssl=trusted)) as session:
            async with session.get(url) as response:
                found.append(await response.text())

    async def get_on_trio() -> None:
        transport = fourtuple.httpx.AsyncTransport(dialers, verify=trusted)
        async with httpx.AsyncClient(transport=transport, timeout=60) as inner:
            found.append((await inner.get(url)).text)

    asyncio.run(get())
    trio.run(get_on_trio)
    assert [text.split()[0] for text in found] == ["127.0.0.77"] * 5


def test_proxies_are_reached_over_dialed_sockets(server: Server) -> None:
    dialers = Dialers(sources="127.0.0.77")
    with fourtuple.requests.session(dialers) as session:
        found = [session.get("http://nowhere.test/", proxies={"http": server.url()}, timeout=60).text]
    with httpx.Client(transport=fourtuple.httpx.Transport(dialers, proxy=server.url()), timeout=60) as client:
        found.append(client.get("http://nowhere.test/").text)
    assert [text.split()[0] for text in found] == ["127.0.0.77"] * 2


def test_keep_alive_uses_one_port(server: Server) -> None:
    with fourtuple.requests.session() as session:
        pages = {session.get(server.url(), timeout=60).text for _ in range(3)}
    assert len(pages) == 1


def test_an_httpcore_without_a_backend_to_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without:
        def __init__(self, **_: Any) -> None: ...

    monkeypatch.setattr(httpcore, "ConnectionPool", Without)
    with pytest.raises(TypeError, match="no network backend"):
        fourtuple.httpx.Transport()
