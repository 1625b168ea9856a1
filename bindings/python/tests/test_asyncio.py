"""asyncio: sockets of `fourtuple.aio` and of `SocketFactory`."""

from __future__ import annotations

import asyncio
import select
import socket
import sys
import threading
from collections.abc import Iterator

import fourtuple
import pytest
from conftest import HIGH, LOW, PORTS, set_sysctl
from fourtuple import aio

DESTINATION = ("127.0.0.1", 9000)

_threads: list[threading.Thread] = []
_recording = False


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if _recording and event == "socket.connect":
        _threads.append(threading.current_thread())


sys.addaudithook(_hook)


@pytest.fixture
def connecting_threads() -> Iterator[list[threading.Thread]]:
    """The threads that call connect()."""
    global _recording
    _threads.clear()
    _recording = True
    yield _threads
    _recording = False


def test_every_port_is_used_then_the_error_has_a_census(listener: socket.socket) -> None:
    async def run() -> None:
        held = [await aio.create_connection(DESTINATION, 60) for _ in range(PORTS)]
        assert {opened.getsockname()[1] for opened in held} == set(range(LOW, HIGH + 1))
        with pytest.raises(fourtuple.PortsExhausted) as raised:
            await aio.create_connection(DESTINATION, 60)
        assert raised.value.census == fourtuple.Census(PORTS, PORTS, 0, 0)
        for opened in held:
            opened.close()

    asyncio.run(run())


def test_long_searches_run_on_another_thread(
    listener: socket.socket, connecting_threads: list[threading.Thread]
) -> None:
    set_sysctl("net.ipv4.ip_local_port_range", "9024 65535")

    async def run(strategy: str) -> None:
        dialers = fourtuple.Dialers(strategy=strategy)
        dialers.get(DESTINATION)
        connecting_threads.clear()
        opened, report = await aio.dial(DESTINATION, 60, dialers=dialers)
        assert strategy in ("auto", report.strategy)
        opened.close()

    asyncio.run(run("full-range"))
    assert connecting_threads and threading.main_thread() not in connecting_threads
    asyncio.run(run("random-window:500"))
    assert connecting_threads == [threading.main_thread()]
    connecting_threads.clear()

    async def default() -> None:
        opened, report = await aio.dial(DESTINATION, 60)
        assert report.strategy == "random-window:1000"
        opened.close()

    asyncio.run(default())
    assert connecting_threads == [threading.main_thread()]


def test_a_refused_handshake_is_refused() -> None:
    async def run() -> None:
        with pytest.raises(fourtuple.Refused):
            await aio.create_connection(("127.0.0.1", 9), 60)

    asyncio.run(run())


def test_a_silent_destination_times_out_and_closes_the_socket(recwarn: pytest.WarningsRecorder) -> None:
    with socket.socket() as full:
        full.bind(DESTINATION)
        full.listen(0)

        async def run() -> None:
            first = await aio.create_connection(DESTINATION, 60)
            # The kernel may return before the listener has received the ACK.
            select.select([full], [], [])
            with pytest.raises(fourtuple.TimedOut) as raised:
                await aio.create_connection(DESTINATION, 0.2)
            assert raised.value.destination == "127.0.0.1:9000" and raised.value.retryable
            first.close()

        asyncio.run(run())
    assert not [warning for warning in recwarn if issubclass(warning.category, ResourceWarning)]


def test_a_silent_source_is_backed_off() -> None:
    with socket.socket() as full:
        full.bind(DESTINATION)
        full.listen(0)

        async def run() -> None:
            first = await aio.create_connection(DESTINATION, 60)
            # The kernel may return before the listener has received the ACK.
            select.select([full], [], [])
            dialers = fourtuple.Dialers(sources="127.0.0.2,127.0.0.3")
            for _ in range(6):
                with pytest.raises(fourtuple.TimedOut) as raised:
                    await aio.create_connection(DESTINATION, 0.05, dialers=dialers)
                tried.append(raised.value.source)
            first.close()

        tried: list[str | None] = []
        asyncio.run(run())
    assert set(tried) == {"127.0.0.2", "127.0.0.3"}, "without a back-off all dials use one source"


def test_streams_exchange_bytes() -> None:
    async def run() -> None:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readexactly(4))
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(echo, *DESTINATION):
            reader, writer = await aio.open_connection(*DESTINATION)
            writer.write(b"ping")
            assert await reader.read() == b"ping"
            writer.close()
            await writer.wait_closed()

    asyncio.run(run())


def test_sockets_of_the_factory_choose_their_port_in_connect(
    listener: socket.socket, connecting_threads: list[threading.Thread]
) -> None:
    factory = fourtuple.SocketFactory()

    async def dial() -> socket.socket:
        loop = asyncio.get_running_loop()
        opened = factory((socket.AF_INET, socket.SOCK_STREAM, 0, "", DESTINATION))
        opened.setblocking(False)
        await loop.sock_connect(opened, DESTINATION)
        return opened

    async def run() -> None:
        held = [await dial() for _ in range(PORTS)]
        assert {opened.getsockname()[1] for opened in held} == set(range(LOW, HIGH + 1))
        report = held[0].dial_report  # type: ignore[attr-defined]
        assert report.source == held[0].getsockname() and report.strategy == "random-window:1000"
        with pytest.raises(fourtuple.PortsExhausted):
            await dial()
        for opened in held:
            opened.close()

    asyncio.run(run())
    assert set(connecting_threads) == {threading.main_thread()}


def test_the_factory_finds_the_only_port_of_many(listener: socket.socket) -> None:
    set_sysctl("net.ipv4.ip_local_port_range", "9024 65535")
    # connect() passes over reserved ports as over ports in use.
    set_sysctl("net.ipv4.ip_local_reserved_ports", "9024-49999,50001-65535")

    def port(dialers: fourtuple.Dialers | None) -> int:
        factory = fourtuple.SocketFactory(dialers)
        with factory((socket.AF_INET, socket.SOCK_STREAM, 0, "", DESTINATION)) as opened:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            opened.connect(DESTINATION)
            return int(opened.getsockname()[1])

    assert {port(None) for _ in range(20)} == {50_000}
    with pytest.raises(fourtuple.PortsExhausted):
        # Eight windows of 1,000 ports miss it in 86% of the dials.
        for _ in range(100):
            port(fourtuple.Dialers(searches="short"))


def test_a_socket_of_the_factory_replaces_a_bound_socket(listener: socket.socket) -> None:
    dialers = fourtuple.Dialers(strategy="select-test-repeat")
    factory = fourtuple.SocketFactory(dialers, socket_options=((socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),))
    held, attempts = [], 0
    for _ in range(PORTS * 3 // 4):
        opened = factory((socket.AF_INET, socket.SOCK_STREAM, 0, "", DESTINATION))
        descriptor = opened.fileno()
        opened.connect(DESTINATION)
        assert opened.fileno() == descriptor and not opened.get_inheritable() and opened.gettimeout() is None
        assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        attempts += opened.dial_report.attempts  # type: ignore[attr-defined]
        held.append(opened)
    assert attempts > len(held)
    for opened in held:
        opened.close()


def test_a_bound_socket_of_the_factory_keeps_its_source(listener: socket.socket) -> None:
    with fourtuple.SocketFactory()((socket.AF_INET, socket.SOCK_STREAM, 0, "", DESTINATION)) as opened:
        opened.bind(("127.0.0.9", 0))
        assert opened.connect_ex(DESTINATION) == 0
        assert opened.getsockname()[0] == "127.0.0.9"
        with opened.dup() as copied:
            assert copied.getpeername() == DESTINATION and copied.fileno() != opened.fileno()


def test_a_cancelled_dial_closes_its_socket(listener: socket.socket) -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 9001))
        full.listen(0)

        async def run() -> None:
            first = await aio.create_connection(("127.0.0.1", 9001), 60)
            dial = asyncio.create_task(aio.create_connection(("127.0.0.1", 9001)))
            while not sockets_to(9001) > 1:
                await asyncio.sleep(0.001)
            dial.cancel()
            with pytest.raises(asyncio.CancelledError):
                await dial
            assert sockets_to(9001) == 1
            first.close()

        asyncio.run(run())


def sockets_to(port: int) -> int:
    """Counts the sockets of this namespace with this remote port."""
    with open("/proc/thread-self/net/tcp") as file:
        return sum(line.split()[2].endswith(f":{port:04X}") for line in file.readlines()[1:])
