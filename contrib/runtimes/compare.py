#!/usr/bin/env python3
"""Requests per second of Java's HttpClient, Netty and Node's http.Agent while 95% of the ports towards the server are in use: with the
kernel's choice of the source port, by `fourtuple run`, and with `fourtuple fix ports`.

Each round is a network namespace with nginx, which closes each connection, and whose ports are filled with TIME_WAIT sockets. In it the
ways run one after the other, in the opposite order in each second round. A ratio is the median of the rounds' ratios to the kernel's
choice. Needs root, nginx, the command in PATH or FOURTUPLE, and java and node for their clients; Netty's jars come by jars.py:

    contrib/runtimes/compare.py --rounds 5
"""

from __future__ import annotations

import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "bindings/python/bench"))

import jars  # noqa: E402
import room  # noqa: E402
from room import TIME_WAIT_S, URL, enter_namespace, fill, sockets, start_nginx  # noqa: E402

FOURTUPLE = os.environ.get("FOURTUPLE") or shutil.which("fourtuple")
# A round is repeated that took longer than a TIME_WAIT socket lasts, as on a busy machine.
ATTEMPTS = 4


def rate(command: list[str]) -> float:
    """Runs a client and returns its requests per second."""
    words = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    count, failed, seconds = int(words[0]), int(words[1]), float(words[2])
    if failed:
        raise SystemExit(f"{command}: {failed} of {count} requests failed")
    return count / seconds


def fixed(command: list[str]) -> float:
    """Runs a client that starts when `fix ports` is attached to it."""
    gate = ["sh", "-c", 'read -r go && exec "$@"', "sh", *command]
    client = subprocess.Popen(gate, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    fix = subprocess.Popen(
        [str(FOURTUPLE), "fix", "ports", "--pid", str(client.pid), "--for", "60s"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert fix.stderr is not None and client.stdin is not None and client.stdout is not None
    line = fix.stderr.readline()
    if not line.startswith("fixing"):
        raise SystemExit(f"fix ports: {line}")
    client.stdin.write("go\n")
    client.stdin.flush()
    words = client.stdout.read().split()
    client.wait()
    fix.terminate()
    fix.wait()
    if not words or words[1] != "0":
        raise SystemExit(f"{command}: {words}")
    return int(words[0]) / float(words[2])


def one_round(ways: dict[str, list[str]], share: float) -> dict[str, float]:
    """Runs the ways of a client in this process's own namespace."""
    enter_namespace()
    with tempfile.TemporaryDirectory() as directory:
        server = start_nginx(directory)
        try:
            began = time.monotonic()
            fill(share)
            found = {way: fixed(command) if way == "fix ports" else rate(command) for way, command in ways.items()}
            # The first TIME_WAIT socket must not end before the last client.
            if time.monotonic() - began > TIME_WAIT_S:
                raise SystemExit(f"the round took longer than {TIME_WAIT_S:.0f} s: fewer requests (--count)")
            print(f"{sockets('tw') / room.PORTS:.1%} of the ports in use at the end", file=sys.stderr)
        finally:
            server.terminate()
            server.wait()
    return found


def in_process(ways: dict[str, list[str]], share: float) -> dict[str, float] | None:
    """Runs a round in a child process, which enters the namespace."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        code = 1
        try:
            found = one_round(ways, share)
            os.write(write, "\n".join(f"{way}={value}" for way, value in found.items()).encode())
            code = 0
        except SystemExit as error:
            print(error, file=sys.stderr)
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as lines:
        text = lines.read()
    os.waitpid(child, 0)
    return {way: float(value) for way, value in (line.split("=") for line in text.splitlines())} or None


def clients(wanted: list[str], count: int, classes: str) -> dict[str, dict[str, list[str]]]:
    """Returns the commands of each client by way."""
    found: dict[str, dict[str, list[str]]] = {}
    for name in wanted:
        if name == "node":
            command = ["node", str(HERE / "agent.js"), URL, str(count)]
        else:
            source = {"java": "HttpGet", "netty": "NettyGet"}[name]
            path = f"{classes}:{jars.class_path()}" if name == "netty" else classes
            subprocess.run(["javac", "-cp", path, "-d", classes, HERE / f"{source}.java"], check=True)
            command = ["java", "-cp", path, source, URL, str(count)]
        ways = {"kernel": command, "run": [str(FOURTUPLE), "run", "--", *command], "fix ports": command}
        if name == "netty":
            ways["option 51"] = [*command, "option"]
        found[name] = ways
    return found


def main() -> None:
    """Runs the rounds and prints a table."""
    parser = room.arguments(__doc__, "java,netty,node")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each client")
    flags = parser.parse_args()
    if FOURTUPLE is None:
        parser.error("there is no fourtuple in PATH: set FOURTUPLE")
    room.set_range(*map(int, flags.range.split("-")))
    load = os.getloadavg()[0]
    print("| client | way | requests/s, median | ratio, median (lowest to highest) |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as classes:
        for name, ways in clients(flags.clients.split(","), flags.count, classes).items():
            rounds: list[dict[str, float]] = []
            for number in range(flags.rounds):
                order = list(ways.items())
                for _ in range(ATTEMPTS):
                    done = in_process(dict(order if number % 2 == 0 else reversed(order)), flags.fill)
                    if done is not None:
                        rounds.append(done)
                        break
            if len(rounds) < flags.rounds:
                print(f"{name}: {flags.rounds - len(rounds)} rounds are missing: no attempt was valid", file=sys.stderr)
            for way in ways if rounds else ():
                ratios = [done[way] / done["kernel"] for done in rounds]
                shown = f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})"
                print(f"| {name} | {way} | {statistics.median(done[way] for done in rounds):,.0f} | {shown} |", flush=True)
    print(f"\nKernel {os.uname().release}, {os.cpu_count()} CPUs, load average {load:.1f} before and {os.getloadavg()[0]:.1f} after.")


if __name__ == "__main__":
    main()
