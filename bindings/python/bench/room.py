"""A network namespace with nginx in which most ports towards nginx are in use: the room of the benchmarks here and of contrib/runtimes.

Needs root and nginx, and nothing of fourtuple.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import fcntl
import math
import pathlib
import random
import socket
import statistics
import struct
import subprocess
import time

LOW, HIGH = 9024, 65535
PORTS = HIGH - LOW + 1
SERVER = ("127.0.0.1", 8080)
URL = "http://127.0.0.1:8080/"
TIME_WAIT_S = 60.0
IP_LOCAL_PORT_RANGE = 51

CONFIGURATION = """
daemon off;
worker_processes 1;
worker_rlimit_nofile 20000;
pid {directory}/pid;
error_log {directory}/error crit;
events {{ worker_connections 16384; }}
http {{
    access_log off;
    keepalive_timeout 0;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    server {{ listen 127.0.0.1:8080 backlog=4096; return 200 "ok"; }}
}}
"""


def set_range(low: int, high: int) -> None:
    """Sets the port range of the room, before it is entered; 56,512 ports otherwise."""
    global LOW, HIGH, PORTS
    LOW, HIGH, PORTS = low, high, high - low + 1


def arguments(description: str | None, clients: str) -> argparse.ArgumentParser:
    """Returns a parser with the flags of every benchmark in the room."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="connections of a run")
    parser.add_argument("--fill", type=float, default=0.95, help="share of the ports in use")
    parser.add_argument("--range", default=f"{LOW}-{HIGH}", help="port range; a smaller one is filled sooner")
    parser.add_argument("--clients", default=clients, help="clients to measure")
    return parser


def enter_namespace() -> None:
    """Moves this process into a new network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x4000_0000) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET): run the benchmark as root")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, 0x8914, struct.pack("16sh14x", b"lo", 1))
    for name, value in {
        "ip_local_port_range": f"{LOW} {HIGH}",
        "tcp_tw_reuse": "0",
        "tcp_max_tw_buckets": "1000000",
    }.items():
        pathlib.Path("/proc/sys/net/ipv4", name).write_text(value)


def start_nginx(directory: str) -> subprocess.Popen[bytes]:
    """Starts nginx and waits until it listens."""
    path = pathlib.Path(directory, "nginx.conf")
    path.write_text(CONFIGURATION.format(directory=directory))
    server = subprocess.Popen(["nginx", "-p", directory, "-c", str(path), "-e", f"{directory}/error"])
    for _ in range(500):
        try:
            socket.create_connection(SERVER).close()
        except ConnectionRefusedError:
            time.sleep(0.01)
        else:
            return server
    server.terminate()
    raise RuntimeError("nginx does not listen after 5 s")


def sockets(kind: str) -> int:
    """Returns the sockets of TCP in the namespace: `inuse`, or `tw` in TIME_WAIT."""
    for line in pathlib.Path("/proc/thread-self/net/sockstat").read_text().splitlines():
        if line.startswith("TCP:"):
            fields = line.split()
            return int(fields[fields.index(kind) + 1])
    return 0


def fill(share: float) -> None:
    """Opens and closes connections until this share of the ports is in TIME_WAIT: all even ports, and then odd ports.

    The kernel leaves its ports in this order: it takes an odd port when no even port is free. A window of one port saves the search.
    """
    odd = list(range(LOW | 1, HIGH + 1, 2))
    random.Random(1).shuffle(odd)
    missing = [*range(LOW, HIGH + 1, 2), *odd][: int(share * PORTS)]
    while missing:
        # nginx closes a connection first if it has too many: that port is free again, and the next pass takes it.
        missing = [port for port in missing if take(port)]
    while sockets("inuse") > 10:
        # nginx still closes connections of the fill.
        time.sleep(0.05)


def take(port: int) -> bool:
    """Opens and closes a connection from a port; returns false if the port was in use already."""
    with socket.socket() as opened:
        opened.setsockopt(socket.SOL_IP, IP_LOCAL_PORT_RANGE, struct.pack("=I", port | port << 16))
        try:
            opened.connect(SERVER)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return False
    return True


def ratio(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Returns the geometric mean of ratios and its 95% interval by bootstrap."""
    logs = [math.log(ours / theirs) for ours, theirs in pairs]
    generator = random.Random(1)
    means = sorted(statistics.fmean(generator.choices(logs, k=len(logs))) for _ in range(10_000))
    return math.exp(statistics.fmean(logs)), math.exp(means[250]), math.exp(means[9749])
