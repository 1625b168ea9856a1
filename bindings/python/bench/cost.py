"""CPU time of a connection while nearly all ports are free: each adapter, and what it replaces, in blocks that alternate.

The time is that of the process, in which only the client runs. No connection leaves a TIME_WAIT socket. Needs root:

    python bench/cost.py
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import pathlib
import random
import socket
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial

import aiohttp
import fourtuple
import fourtuple.aio
import fourtuple.aiohttp
import fourtuple.httpx
import fourtuple.requests
import httpx
import requests
from room import enter_namespace

CONNECTIONS = 100
HOST, PORT = "127.0.0.1", 7000
URL = f"http://{HOST}:{PORT}/"
ANSWER = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"

Block = Callable[[int], None]
"""Makes this number of connections."""

Opened = Awaitable[tuple[asyncio.Transport, asyncio.Protocol]]


def with_socket(host: str, count: int) -> None:
    for _ in range(count):
        # Looked up at each call: patch() replaces it.
        socket.create_connection((host, PORT), 5).close()


def with_fourtuple(count: int) -> None:
    for _ in range(count):
        fourtuple.create_connection((HOST, PORT), 5).close()


def on_loop(dial: Callable[[asyncio.AbstractEventLoop], Opened], count: int) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(count):
            transport, _ = await dial(loop)
            transport.close()
            # The loop closes the socket in its next turn.
            await asyncio.sleep(0)

    asyncio.run(run())


def by_loop(loop: asyncio.AbstractEventLoop) -> Opened:
    return loop.create_connection(asyncio.Protocol, HOST, PORT)


async def by_aio(loop: asyncio.AbstractEventLoop) -> tuple[asyncio.Transport, asyncio.Protocol]:
    opened = await fourtuple.aio.create_connection((HOST, PORT))
    return await loop.create_connection(asyncio.Protocol, sock=opened)


def with_requests(make: Callable[[], requests.Session], count: int) -> None:
    with make() as session:
        session.trust_env = False
        for _ in range(count):
            session.get(URL).raise_for_status()


def with_httpx(make: Callable[[], httpx.BaseTransport], count: int) -> None:
    with httpx.Client(transport=make()) as client:
        for _ in range(count):
            client.get(URL).raise_for_status()


def with_async_httpx(make: Callable[[], httpx.AsyncBaseTransport], count: int) -> None:
    async def run() -> None:
        async with httpx.AsyncClient(transport=make()) as client:
            for _ in range(count):
                (await client.get(URL)).raise_for_status()

    asyncio.run(run())


def with_aiohttp(make: Callable[[], aiohttp.TCPConnector], count: int) -> None:
    async def run() -> None:
        async with aiohttp.ClientSession(connector=make()) as session:
            for _ in range(count):
                async with session.get(URL) as response:
                    await response.read()

    asyncio.run(run())


CASES: list[tuple[str, Block, str, Block | None]] = [
    ("`socket.create_connection()`", partial(with_socket, HOST), "`patch()`", None),
    ("the same with `localhost`", partial(with_socket, "localhost"), "`patch()`", None),
    ("`socket.create_connection()`", partial(with_socket, HOST), "`fourtuple.create_connection()`", with_fourtuple),
    ("`loop.create_connection()`", partial(on_loop, by_loop), "`patch()`", None),
    (
        "`loop.create_connection()`",
        partial(on_loop, by_loop),
        "the same with the socket of `fourtuple.aio.create_connection()`",
        partial(on_loop, by_aio),
    ),
    ("requests", partial(with_requests, requests.Session), "`patch()`", None),
    (
        "requests",
        partial(with_requests, requests.Session),
        "`fourtuple.requests.session()`",
        partial(with_requests, fourtuple.requests.session),
    ),
    (
        "httpx",
        partial(with_httpx, httpx.HTTPTransport),
        "`fourtuple.httpx.Transport()`",
        partial(with_httpx, fourtuple.httpx.Transport),
    ),
    (
        "httpx, asynchronous",
        partial(with_async_httpx, httpx.AsyncHTTPTransport),
        "`fourtuple.httpx.AsyncTransport()`",
        partial(with_async_httpx, fourtuple.httpx.AsyncTransport),
    ),
    ("aiohttp", partial(with_aiohttp, aiohttp.TCPConnector), "`patch()`", None),
    (
        "aiohttp",
        partial(with_aiohttp, aiohttp.TCPConnector),
        "`fourtuple.aiohttp.connector()`",
        partial(with_aiohttp, fourtuple.aiohttp.connector),
    ),
]
"""What is replaced, and by what; `None` stands for the same after patch()."""


def microseconds(theirs: Block, ours: Block | None, is_ours: bool) -> float:
    """Returns the CPU time of a connection with one of both."""
    block = ours if is_ours and ours else theirs
    with fourtuple.patch() if is_ours and ours is None else contextlib.nullcontext():
        # The interpreter adapts to the replaced functions, and libraries to their first connection.
        block(20)
        began = time.process_time_ns()
        block(CONNECTIONS)
        return (time.process_time_ns() - began) / CONNECTIONS / 1000


def ratio(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Returns the median of the ratios of neighbours and its 95% interval by bootstrap."""
    ratios = [ours / theirs for theirs, ours in pairs]
    generator = random.Random(1)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[50], medians[1949]


def serve() -> None:
    """Answers each request, and closes when the client has closed or the answer is sent."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ANSWER)
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(answer, HOST, PORT, backlog=4096) as server:
            await server.serve_forever()

    asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=30, help="pairs of blocks of 100 connections for each adapter")
    parser.add_argument("--cases", default="", help="measure only cases whose names contain this text")
    flags = parser.parse_args()
    load = os.getloadavg()[0]
    enter_namespace()
    pathlib.Path("/proc/sys/net/ipv4/tcp_max_tw_buckets").write_text("0")
    server = multiprocessing.get_context("fork").Process(target=serve, daemon=True)
    server.start()
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection((HOST, PORT)).close()
            break
    print("| replaced | by | CPU per connection, us: replaced, by | ratio (95% interval) |\n|---|---|---|---|")
    for name, theirs, by, ours in CASES:
        if flags.cases not in f"{name} {by}":
            continue
        pairs: list[tuple[float, float]] = []
        for number in range(flags.blocks):
            order = (False, True) if number % 2 else (True, False)
            found = {is_ours: microseconds(theirs, ours, is_ours) for is_ours in order}
            pairs.append((found[False], found[True]))
        without, with_ = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
        middle, low, high = ratio(pairs)
        print(f"| {name} | {by} | {without:.1f}, {with_:.1f} | {middle:.2f} ({low:.2f} to {high:.2f}) |", flush=True)
    print(f"\nKernel {os.uname().release}, load {load:.1f} before and {os.getloadavg()[0]:.1f} after.")
    server.terminate()


if __name__ == "__main__":
    main()
