"""Connections per second of aiohttp, requests and httpx while 95% of the ports towards the server are in use, with and without
fourtuple.

Each trial is a process in a network namespace of its own: it starts nginx, fills the ports with TIME_WAIT sockets, which occupy ports
without descriptors, and makes one new connection per request. nginx closes first, so that the occupancy stays. Trials with and
without alternate (A B B A); the ratio of neighbours has a 95% interval from a bootstrap over the pairs. Needs root and nginx:

    python bench/clients.py --pairs 6 --json figures.json
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import errno
import fcntl
import json
import math
import os
import pathlib
import random
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import TypedDict

import aiohttp
import fourtuple
import fourtuple.aiohttp
import fourtuple.httpx
import fourtuple.requests
import httpx
import requests

LOW, HIGH = 9024, 65535
PORTS = HIGH - LOW + 1
SERVER = ("127.0.0.1", 8080)
URL = "http://127.0.0.1:8080/"
TIME_WAIT_S = 60.0
ATTEMPTS = 3
IP_LOCAL_PORT_RANGE = 51
CLIENTS = ("aiohttp", "requests", "httpx", "httpx-async")

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


class Trial(TypedDict):
    """The figures of one trial."""

    client: str
    with_fourtuple: bool
    per_s: float
    cpu_us: float
    fill: float
    failed: int
    valid: bool


def enter_namespace() -> None:
    """Moves this process into a new network namespace with 56,512 ports."""
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


def with_requests(count: int, ours: bool) -> int:
    """Makes connections with requests, one after the other; returns how many failed."""
    failed = 0
    with fourtuple.requests.session() if ours else requests.Session() as session:
        session.trust_env = False
        for _ in range(count):
            try:
                session.get(URL).raise_for_status()
            except requests.RequestException:
                failed += 1
    return failed


def with_httpx(count: int, ours: bool) -> int:
    """Makes connections with httpx, one after the other."""
    failed = 0
    transport = fourtuple.httpx.Transport() if ours else httpx.HTTPTransport()
    with httpx.Client(transport=transport) as client:
        for _ in range(count):
            try:
                client.get(URL).raise_for_status()
            except httpx.TransportError:
                failed += 1
    return failed


async def concurrently(count: int, tasks: int, get: Callable[[], asyncio.Future[bool]]) -> int:
    """Makes connections with several tasks."""
    left = iter(range(count))
    failed = 0

    async def work() -> None:
        nonlocal failed
        for _ in left:
            failed += not await get()

    await asyncio.gather(*(work() for _ in range(tasks)))
    return failed


async def with_async_httpx(count: int, ours: bool) -> int:
    """Makes connections with the asynchronous client of httpx, 8 at a time."""
    transport = fourtuple.httpx.AsyncTransport() if ours else httpx.AsyncHTTPTransport()
    async with httpx.AsyncClient(transport=transport) as client:

        async def get() -> bool:
            try:
                (await client.get(URL)).raise_for_status()
            except httpx.TransportError:
                return False
            return True

        return await concurrently(count, 8, lambda: asyncio.ensure_future(get()))


async def with_aiohttp(count: int, ours: bool) -> int:
    """Makes connections with aiohttp, 8 at a time."""
    connector = fourtuple.aiohttp.connector() if ours else aiohttp.TCPConnector()
    async with aiohttp.ClientSession(connector=connector) as session:

        async def get() -> bool:
            try:
                async with session.get(URL) as response:
                    await response.read()
            except aiohttp.ClientError:
                return False
            return True

        return await concurrently(count, 8, lambda: asyncio.ensure_future(get()))


def trial(client: str, ours: bool, count: int, share: float) -> Trial:
    """Runs a trial in this process."""
    enter_namespace()
    with tempfile.TemporaryDirectory() as directory:
        server = start_nginx(directory)
        try:
            began = time.monotonic()
            fill(share)
            filled = sockets("tw") / PORTS
            run: Callable[[int], int] = {
                "requests": lambda n: with_requests(n, ours),
                "httpx": lambda n: with_httpx(n, ours),
                "httpx-async": lambda n: asyncio.run(with_async_httpx(n, ours)),
                "aiohttp": lambda n: asyncio.run(with_aiohttp(n, ours)),
            }[client]
            # Imports and caches of the library.
            run(5)
            cpu, start = time.process_time(), time.perf_counter()
            failed = run(count)
            took, used = time.perf_counter() - start, time.process_time() - cpu
            # The first TIME_WAIT socket must not end before the trial.
            valid = failed == 0 and time.monotonic() - began < TIME_WAIT_S
        finally:
            server.terminate()
            server.wait()
    return Trial(
        client=client,
        with_fourtuple=ours,
        per_s=count / took,
        cpu_us=used / count * 1e6,
        fill=filled,
        failed=failed,
        valid=valid,
    )


def in_process(client: str, ours: bool, count: int, share: float) -> Trial:
    """Runs a trial in a process of its own."""
    command = [sys.executable, __file__, "--trial", client, "--count", str(count), "--fill", str(share)]
    for _ in range(ATTEMPTS):
        output = subprocess.run([*command, *(["--ours"] if ours else [])], check=True, stdout=subprocess.PIPE).stdout
        found: Trial = json.loads(output)
        if found["valid"]:
            break
        print(f"{client}: a trial is not valid: {found}", file=sys.stderr)
    return found


def ratio(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Returns the geometric mean of ratios and its 95% interval by bootstrap."""
    logs = [math.log(ours / theirs) for ours, theirs in pairs]
    generator = random.Random(1)
    means = sorted(statistics.fmean(generator.choices(logs, k=len(logs))) for _ in range(10_000))
    return math.exp(statistics.fmean(logs)), math.exp(means[250]), math.exp(means[9749])


def main() -> None:
    """Runs all trials in turn and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6, help="pairs of trials for each client")
    parser.add_argument("--count", type=int, default=200, help="connections of a trial")
    parser.add_argument("--fill", type=float, default=0.95, help="share of the ports in use")
    parser.add_argument("--clients", default=",".join(CLIENTS), help="clients to measure")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures of all trials")
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.trial is not None:
        print(json.dumps(trial(flags.trial, flags.ours, flags.count, flags.fill)))
        return
    load = os.getloadavg()
    trials: list[Trial] = []
    print("| client | without, conn/s | with, conn/s | ratio (95% interval) | CPU per connection, us: without, with |")
    print("|---|---|---|---|---|")
    for client in flags.clients.split(","):
        pairs: list[tuple[Trial, Trial]] = []
        for pair in range(flags.pairs):
            order = (False, True) if pair % 2 == 0 else (True, False)
            made = {ours: in_process(client, ours, flags.count, flags.fill) for ours in order}
            pairs.append((made[False], made[True]))
            trials += made.values()
        valid = [(theirs, ours) for theirs, ours in pairs if theirs["valid"] and ours["valid"]]
        if len(valid) < len(pairs):
            print(f"{client}: {len(pairs) - len(valid)} pairs are invalid and left out", file=sys.stderr)
        if not valid:
            continue
        mean, low, high = ratio([(ours["per_s"], theirs["per_s"]) for theirs, ours in valid])
        without = statistics.median(theirs["per_s"] for theirs, _ in valid)
        with_ = statistics.median(ours["per_s"] for _, ours in valid)
        cpu = [statistics.median(pair[side]["cpu_us"] for pair in valid) for side in (0, 1)]
        print(
            f"| {client} | {without:,.0f} | {with_:,.0f} | {mean:.1f} ({low:.1f} to {high:.1f}) "
            f"| {cpu[0]:,.0f}, {cpu[1]:,.0f} |",
            flush=True,
        )
    kernel = os.uname().release
    print(f"\nKernel {kernel}, {os.cpu_count()} CPUs, load {load[0]:.1f} before and {os.getloadavg()[0]:.1f} after.")
    if flags.json is not None:
        flags.json.write_text(json.dumps({"kernel": kernel, "load": load, "trials": trials}, indent=1))


if __name__ == "__main__":
    main()
