"""Connections per second of aiohttp, requests and httpx while 95% of the ports towards the server are in use, with and without
fourtuple.

Each trial is a process in a network namespace of its own: it starts nginx, fills the ports with TIME_WAIT sockets, which occupy ports
without descriptors, and makes one new connection per request. nginx closes first, so that the occupancy stays. Trials with and
without alternate (A B B A); the ratio of neighbours has a 95% interval from a bootstrap over the pairs. With --patch the clients are
unchanged, after fourtuple.patch(). Needs root and nginx:

    python bench/clients.py --pairs 6 --json figures.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import statistics
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
import room
from room import TIME_WAIT_S, URL, enter_namespace, fill, ratio, sockets, start_nginx

ATTEMPTS = 3
CLIENTS = ("aiohttp", "requests", "httpx", "httpx-async")


class Trial(TypedDict):
    """The figures of one trial."""

    client: str
    with_fourtuple: bool
    per_s: float
    cpu_us: float
    fill: float
    failed: int
    valid: bool


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


def trial(client: str, ours: bool, count: int, share: float, patched: bool) -> Trial:
    """Runs a trial in this process."""
    enter_namespace()
    with tempfile.TemporaryDirectory() as directory:
        server = start_nginx(directory)
        try:
            began = time.monotonic()
            fill(share)
            filled = sockets("tw") / room.PORTS
            if patched:
                fourtuple.patch()
            adapted = ours and not patched
            run: Callable[[int], int] = {
                "requests": lambda n: with_requests(n, adapted),
                "httpx": lambda n: with_httpx(n, adapted),
                "httpx-async": lambda n: asyncio.run(with_async_httpx(n, adapted)),
                "aiohttp": lambda n: asyncio.run(with_aiohttp(n, adapted)),
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


def in_process(client: str, ours: bool, flags: argparse.Namespace) -> Trial:
    """Runs a trial in a process of its own."""
    command = [sys.executable, __file__, "--trial", client, "--count", str(flags.count), "--fill", str(flags.fill)]
    command += ["--range", flags.range]
    for _ in range(ATTEMPTS):
        more = [*(["--ours"] if ours else []), *(["--patch"] if ours and flags.patch else [])]
        output = subprocess.run([*command, *more], check=True, stdout=subprocess.PIPE).stdout
        found: Trial = json.loads(output)
        if found["valid"]:
            break
        print(f"{client}: a trial is not valid: {found}", file=sys.stderr)
    return found


def main() -> None:
    """Runs all trials in turn and prints a table."""
    parser = room.arguments(__doc__, ",".join(CLIENTS))
    parser.add_argument("--pairs", type=int, default=6, help="pairs of trials for each client")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures of all trials")
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    parser.add_argument("--patch", action="store_true", help="fourtuple.patch() in the place of the adapters")
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    room.set_range(*map(int, flags.range.split("-")))
    if flags.trial is not None:
        print(json.dumps(trial(flags.trial, flags.ours, flags.count, flags.fill, flags.patch)))
        return
    load = os.getloadavg()
    trials: list[Trial] = []
    print("| client | without, conn/s | with, conn/s | ratio (95% interval) | CPU per connection, us: without, with |")
    print("|---|---|---|---|---|")
    for client in flags.clients.split(","):
        pairs: list[tuple[Trial, Trial]] = []
        for pair in range(flags.pairs):
            order = (False, True) if pair % 2 == 0 else (True, False)
            made = {ours: in_process(client, ours, flags) for ours in order}
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
