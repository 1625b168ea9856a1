"""Blocking sockets."""

from __future__ import annotations

import errno
import itertools
import pickle
import select
import socket
import sys
import threading

import fourtuple
import fourtuple.connect
import pytest
from conftest import HIGH, LOW, PORTS, set_sysctl

DESTINATION = ("127.0.0.1", 9000)
AUTO_AND_WINDOWS = ["auto", "full-range", "random-window:8"]


def fill(count: int = PORTS, **settings: object) -> list[socket.socket]:
    """Opens connections that stay open."""
    return [fourtuple.create_connection(DESTINATION, **settings) for _ in range(count)]  # type: ignore[arg-type]


def close(sockets: list[socket.socket]) -> None:
    for opened in sockets:
        opened.close()


@pytest.mark.parametrize("strategy", AUTO_AND_WINDOWS)
def test_every_port_is_used_then_the_error_names_the_cause(listener: socket.socket, strategy: str) -> None:
    dialers = fourtuple.Dialers(strategy=strategy)
    held = fill(dialers=dialers)
    assert {opened.getsockname()[1] for opened in held} == set(range(LOW, HIGH + 1))
    with pytest.raises(fourtuple.PortsExhausted) as raised:
        fourtuple.create_connection(DESTINATION, dialers=dialers)
    error = raised.value
    assert error.errno == errno.EADDRNOTAVAIL and error.retryable
    assert error.destination == "127.0.0.1:9000" and error.source is None
    assert error.census == fourtuple.Census(PORTS, PORTS, 0, 0)
    assert "no source port is left" in str(error)
    close(held)


def test_a_closed_connection_makes_the_next_dial_succeed(listener: socket.socket) -> None:
    held = fill()
    with pytest.raises(fourtuple.PortsExhausted):
        fourtuple.create_connection(DESTINATION)
    # A reset leaves no TIME_WAIT socket.
    held[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    port = held[0].getsockname()[1]
    held[0].close()
    held[0] = fourtuple.create_connection(DESTINATION)
    assert held[0].getsockname()[1] == port
    close(held)


def test_a_pool_of_sources_multiplies_the_ports(listener: socket.socket) -> None:
    dialers = fourtuple.Dialers(sources=["127.0.0.2", "127.0.0.3"])
    held = fill(2 * PORTS, dialers=dialers)
    assert len({opened.getsockname() for opened in held}) == 2 * PORTS
    with pytest.raises(fourtuple.PortsExhausted) as raised:
        fourtuple.create_connection(DESTINATION, dialers=dialers)
    assert raised.value.source in ("127.0.0.2", "127.0.0.3")
    close(held)


def test_a_source_address_shares_ports_among_destinations(listener: socket.socket) -> None:
    with socket.socket() as second:
        second.bind(("127.0.0.1", 9001))
        second.listen(4096)
        held = fill(source_address=("127.0.0.7", 0))
        held += [fourtuple.create_connection(("127.0.0.1", 9001), 60, ("127.0.0.7", 0)) for _ in range(PORTS)]
        assert {opened.getsockname()[0] for opened in held} == {"127.0.0.7"}
        close(held)


def test_binding_by_number_retries_on_new_sockets(listener: socket.socket) -> None:
    dialers = fourtuple.Dialers(strategy="select-test-repeat")
    held, attempts = [], 0
    for _ in range(PORTS * 3 // 4):
        opened, report = fourtuple.dial(
            DESTINATION, dialers=dialers, socket_options=[(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
        )
        assert report.source == opened.getsockname() and report.strategy == "select-test-repeat"
        assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        attempts += report.attempts
        held.append(opened)
    assert attempts > len(held), "48 draws of 64 ports repeat one"
    close(held)


def test_a_refused_connection_is_a_connection_refused_error() -> None:
    with pytest.raises(fourtuple.Refused) as raised:
        fourtuple.create_connection(("127.0.0.1", 9))
    assert isinstance(raised.value, ConnectionRefusedError) and raised.value.errno == errno.ECONNREFUSED
    assert raised.value.retryable and raised.value.destination == "127.0.0.1:9"


def test_a_silent_destination_times_out() -> None:
    with socket.socket() as full:
        full.bind(DESTINATION)
        full.listen(0)
        # The queue takes one connection; the kernel drops further SYNs.
        held = fill(1)
        # The kernel may return before the listener has received the ACK.
        select.select([full], [], [])
        with pytest.raises(fourtuple.TimedOut) as raised:
            fourtuple.create_connection(DESTINATION, 0.2)
        assert isinstance(raised.value, TimeoutError) and raised.value.errno == errno.ETIMEDOUT
        close(held)


def test_a_foreign_source_is_named(listener: socket.socket) -> None:
    with pytest.raises(fourtuple.SourceNotLocal) as raised:
        fourtuple.create_connection(DESTINATION, source_address=("203.0.113.1", 0))
    assert raised.value.source == "203.0.113.1" and not raised.value.retryable
    assert raised.value.errno == errno.EADDRNOTAVAIL


def test_a_socket_connected_to_itself_is_an_error() -> None:
    own = ("127.0.0.1", LOW)
    with pytest.raises(fourtuple.SelfConnect):
        fourtuple.create_connection(own, source_address=own)


def test_the_only_port_is_that_of_the_destination() -> None:
    set_sysctl("net.ipv4.ip_local_port_range", "41000 41000")
    with pytest.raises(fourtuple.SelfConnect):
        fourtuple.create_connection(("127.0.0.1", 41_000))


def test_an_address_is_what_getaddrinfo_finds() -> None:
    addresses = ["127.0.0.1", "0.0.0.0", "::1", "0:0::7", "::ffff:10.0.0.1", "fe80::1"]
    others = ["fe80::1%lo", "127.1", "010.0.0.1", "1.2.3.4.", "", "a\0b", ":::", "256.0.0.1", None, b"127.0.0.1"]
    ports = [80, 0, -1, 65_536, "80", "http", None, True]
    for host, port, family in itertools.product([*addresses, *others], ports, [0, socket.AF_INET, socket.AF_INET6]):
        found = fourtuple.connect.numeric(host, port, family)
        assert found or not (host in addresses and port in (80, 0) and family == 0), (host, port)
        if found is not None:
            (entry,) = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)  # type: ignore[arg-type]
            assert found == entry


def test_a_replaced_getaddrinfo_is_asked_for_addresses(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest: real("127.0.0.1", *rest))
    with fourtuple.create_connection(("192.0.2.1", 9000)) as opened:
        assert opened.getpeername() == DESTINATION


def test_a_busy_tuple_is_named(listener: socket.socket) -> None:
    source = ("127.0.0.1", 45_000)
    with fourtuple.create_connection(DESTINATION, source_address=source):
        with pytest.raises(fourtuple.TupleBusy) as raised:
            fourtuple.create_connection(DESTINATION, source_address=source)
    assert raised.value.source == "127.0.0.1:45000"


@pytest.mark.parametrize(
    "settings", [{"strategy": "fast"}, {"sources": "eth0"}, {"sources": "10.0.0.1,::1"}, {"device": "x" * 16}]
)
def test_wrong_settings_are_refused_at_once(settings: dict[str, str]) -> None:
    with pytest.raises(fourtuple.SettingsError):
        fourtuple.Dialers(**settings)  # type: ignore[arg-type]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="ExceptionGroup is new in Python 3.11")
def test_errors_of_all_addresses_are_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (f"127.0.0.{last}", 9)) for last in (1, 2)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    with pytest.raises(ExceptionGroup) as raised:  # noqa: F821
        fourtuple.create_connection(("two.test", 9), all_errors=True)
    named = [getattr(error, "destination", None) for error in raised.value.exceptions]
    assert named == ["127.0.0.1:9", "127.0.0.2:9"]


def test_errors_survive_pickle(listener: socket.socket) -> None:
    held = fill()
    with pytest.raises(fourtuple.PortsExhausted) as raised:
        fourtuple.create_connection(DESTINATION)
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (copy.errno, copy.census, str(copy)) == (raised.value.errno, raised.value.census, str(raised.value))
    close(held)


def test_threads_share_one_ledger(listener: socket.socket) -> None:
    dialers = fourtuple.Dialers()
    held: list[socket.socket] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            held.extend(fill(PORTS // 4, dialers=dialers))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len({opened.getsockname()[1] for opened in held}) == PORTS
    assert dialers.destinations == 1
    close(held)


def test_ipv6_destinations_are_dialed() -> None:
    with socket.socket(socket.AF_INET6) as listener:
        listener.bind(("::1", 9000))
        listener.listen(10)
        with fourtuple.create_connection(("::1", 9000)) as opened:
            assert LOW <= opened.getsockname()[1] <= HIGH


def test_the_cache_of_dialers_is_bounded(listener: socket.socket) -> None:
    dialers = fourtuple.Dialers(limit=2)
    for last in range(1, 6):
        dialers.get((f"127.0.0.{last}", 9000))
    assert dialers.destinations == 2
    # The least recently used goes first.
    dialers.cached(("127.0.0.4", 9000))
    dialers.get(("127.0.0.6", 9000))
    assert dialers.cached(("127.0.0.4", 9000)) and not dialers.cached(("127.0.0.5", 9000))


def test_the_dialer_reads_the_ports_of_other_sockets(listener: socket.socket) -> None:
    set_sysctl("net.ipv4.ip_local_port_range", "41000 41001")
    with socket.create_connection(DESTINATION) as other:
        opened, report = fourtuple.dial(DESTINATION, dialers=fourtuple.Dialers())
        assert opened.getsockname()[1] != other.getsockname()[1]
        assert report.attempts == 1, "the ledger named the free port"
        opened.close()


def test_a_closed_socket_is_an_error_and_no_other_socket(listener: socket.socket) -> None:
    dialer = fourtuple.Dialers().get(DESTINATION)
    opened = socket.socket()
    attempt = dialer.prepare(opened)
    opened.close()
    with pytest.raises(OSError) as raised:
        attempt.finish(opened)
    assert raised.value.errno == errno.EBADF
