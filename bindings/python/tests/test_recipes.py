"""The recipes of docs/python.md, as the page has them, with the libraries and servers that they name.

Addresses of the page become 127.0.0.1, and the dialers get a source address, which the server sees.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import fourtuple
import pytest
from conftest import require
from server import Server
from test_documentation import EXAMPLES

SOURCE = "127.0.0.77"


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    """Ends the patch of a recipe."""
    yield
    fourtuple.unpatch()


def recipe(name: str) -> str:
    """Returns the recipe that imports a library."""
    found: str
    (found,) = [example for example in EXAMPLES if f"\nimport {name}\n" in f"\n{example}"]
    for host in ("10.0.0.9", "storage.example"):
        found = found.replace(host, "127.0.0.1")
    # The source is what the server can see of a dialer.
    replaced = found.replace("fourtuple.patch()", f"fourtuple.patch(fourtuple.Dialers(sources={SOURCE!r}))")
    return replaced.replace(
        "fourtuple.create_connection(", f"fourtuple.create_connection(source_address=({SOURCE!r}, 0), address="
    )


def run(name: str) -> dict[str, object]:
    """Runs a recipe in this process and returns its names."""
    names: dict[str, object] = {"__name__": "recipe"}
    exec(compile(recipe(name), f"recipe of {name}", "exec"), names)
    return names


def begin(command: list[str], port: int, user: int | None = None) -> subprocess.Popen[bytes]:
    """Starts a server in the namespace of the test and waits until it listens."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, user=user)
    for _ in range(1000):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return process
        except ConnectionRefusedError:
            assert process.poll() is None, f"{command} ended"
            time.sleep(0.01)
    process.kill()
    raise AssertionError(f"{command} does not listen")


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@pytest.fixture
def redis_server(namespace: None) -> Iterator[None]:
    require("programs", shutil.which("redis-server") is not None, "redis-server")
    process = begin(
        ["redis-server", "--port", "6379", "--bind", "127.0.0.1", "--save", "", "--protected-mode", "no"], 6379
    )
    yield
    end(process)


@pytest.fixture(scope="session")
def database() -> Iterator[tuple[str, str, int | None]]:
    """The directories of the programs and of the data of PostgreSQL, and the user that it runs as: it refuses root."""
    programs = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin"))
    require("programs", bool(programs), "postgresql")
    user = 65_534 if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory() as directory:
        if user is not None:
            os.chown(directory, user, user)
        data = f"{directory}/data"
        initdb = [f"{programs[-1]}/initdb", "--no-sync", "-A", "trust", "-U", "tester", "-D", data]
        subprocess.run(initdb, check=True, capture_output=True, user=user)
        pathlib.Path(data, "pg_hba.conf").write_text("host all all 127.0.0.0/8 trust\n")
        yield str(programs[-1]), data, user


@pytest.fixture
def postgres(namespace: None, database: tuple[str, str, int | None]) -> Iterator[None]:
    programs, data, user = database
    settings = [
        "listen_addresses=127.0.0.1",
        "unix_socket_directories=",
        "dynamic_shared_memory_type=mmap",
        "fsync=off",
    ]
    options = [word for setting in settings for word in ("-c", setting)]
    process = begin([f"{programs}/postgres", "-D", data, *options], 5432, user)
    # It listens before it is ready.
    while subprocess.run([f"{programs}/pg_isready", "-q", "-h", "127.0.0.1"]).returncode != 0:
        assert process.poll() is None, "postgres ended"
        time.sleep(0.02)
    yield
    # SIGINT: a fast end, after which the next start needs no recovery.
    process.send_signal(2)
    process.wait()


def test_redis_dials_with_a_connection_class(redis_server: None) -> None:
    assert str(run("redis")["answer"]).startswith(SOURCE)


def test_redis_asyncio_and_asyncpg_are_patched(redis_server: None, postgres: None) -> None:
    names = run("asyncpg")
    assert str(names["redis_address"]).startswith(SOURCE) and str(names["postgres_address"]).startswith(SOURCE)


def test_boto3_is_patched(server: Server) -> None:
    assert str(run("boto3")["body"]).startswith(f"b'{SOURCE}")


def test_greenlets_run_while_one_dials(server: Server, tmp_path: pathlib.Path) -> None:
    # gevent replaces the standard library for good.
    more = """
import time
full = gevent.socket.socket()
full.bind(("127.0.0.1", 9000))
full.listen(0)
held = [socket.create_connection(("127.0.0.1", 9000), 60)]
ticks = 0
def tick():
    global ticks
    while True:
        gevent.sleep(0.01)
        ticks += 1
gevent.spawn(tick)
try:
    socket.create_connection(("127.0.0.1", 9000), 0.5)
except TimeoutError:
    print(ticks > 0)
"""
    script = tmp_path / "recipe.py"
    script.write_text(recipe("gevent").replace("80)", "8080)") + more)
    made = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout.split()
    assert made == [SOURCE, SOURCE, SOURCE, "True"]


PSYCOPG = """
import psycopg
for _ in range(5):
    with psycopg.connect("host=127.0.0.1 user=tester dbname=postgres") as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
"""

GRPC = """
import grpc
from concurrent import futures
handler = grpc.method_handlers_generic_handler("test", {"echo": grpc.unary_unary_rpc_method_handler(lambda request, _: request)})
server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[handler])
server.add_insecure_port("127.0.0.1:50051")
server.start()
for number in range(5):
    # Channels with the same settings share one connection.
    with grpc.insecure_channel("127.0.0.1:50051", [("test", number)]) as channel:
        assert channel.unary_unary("/test/echo")(b"ping", wait_for_ready=True, timeout=60) == b"ping"
server.stop(0).wait()
"""


RUNTIMES = pathlib.Path(__file__).resolve().parents[3] / "contrib/runtimes"

CLIENTS = {
    "psycopg": [sys.executable, "-c", PSYCOPG],
    "grpcio": [sys.executable, "-c", GRPC],
    # The examples of docs/java.md and docs/node.md.
    "java": ["java", str(RUNTIMES / "HttpGet.java"), "http://127.0.0.1:8080/", "5"],
    "node": ["node", str(RUNTIMES / "agent.js"), "http://127.0.0.1:8080/", "5"],
}


def fourtuple_command() -> str:
    command = os.environ.get("FOURTUPLE") or shutil.which("fourtuple")
    require("programs", command is not None, "FOURTUPLE, the path of the command")
    return str(command)


@pytest.mark.parametrize("name", CLIENTS)
def test_run_gives_ports_to_programs_that_connect_in_c(
    name: str, server: Server, tmp_path: pathlib.Path, request: pytest.FixtureRequest
) -> None:
    client = CLIENTS[name]
    command = fourtuple_command()
    require(name, shutil.which(client[0]) is not None, client[0])
    if name == "psycopg":
        request.getfixturevalue("postgres")
    record = tmp_path / "record.json"
    # `cgroup` needs rights that a test in a user namespace lacks.
    words = [command, "run", "--via", "preload", "--json", str(record), "--", *client]
    subprocess.run(words, check=True, capture_output=True)
    results = json.loads(record.read_text())["results"]
    assert results["changed"] == results["connects"] > 0, results


NETTY = (RUNTIMES / "NettyGet.java").read_text()


def netty(tmp_path: pathlib.Path) -> str:
    """Returns a class path of Netty and of the classes of the test."""
    require("java", shutil.which("javac") is not None, "javac")
    require("ip_local_port_range", tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 8), "Linux 6.8")
    # There is no route out of the namespace: .ci/python has fetched the jars.
    jars = subprocess.run([sys.executable, RUNTIMES / "jars.py"], capture_output=True, text=True)
    require("java", jars.returncode == 0, jars.stderr.strip())
    return f"{tmp_path}:{jars.stdout.strip()}"


def parities(server: Server, tmp_path: pathlib.Path, client: str, *option: str) -> set[int]:
    """Runs a client of Netty and returns whether its ports were even (0), odd (1) or both.

    Without IP_LOCAL_PORT_RANGE the kernel takes an odd port only if no even one is free; with it, one port after the other.
    """
    server.ports.clear()
    (tmp_path / "NettyGet.java").write_text(client)
    words = ["java", "-cp", netty(tmp_path), str(tmp_path / "NettyGet.java"), server.url(), "20", *option]
    subprocess.run(words, check=True)
    # Two requests are the first tenth, which the client does not count.
    assert len(server.ports) == 22, server.ports
    return {port % 2 for port in server.ports}


def test_netty_option_searches_port_by_port(server: Server, tmp_path: pathlib.Path) -> None:
    (block,) = re.findall(r"```java\n(.*?)```", (RUNTIMES.parents[1] / "docs/java.md").read_text(), re.DOTALL)
    assert all(line in NETTY for line in block.splitlines()), "NettyGet.java has other lines than docs/java.md"
    assert parities(server, tmp_path, NETTY) == {0}
    assert parities(server, tmp_path, NETTY, "option") == {0, 1}


def test_netty_printed_class_searches_port_by_port(server: Server, tmp_path: pathlib.Path) -> None:
    words = [fourtuple_command(), "fix", "--print", "netty", "--to", "127.0.0.1:8080", "--source", "127.0.0.1/32"]
    source = tmp_path / "SourcePorts.java"
    source.write_bytes(subprocess.run(words, check=True, capture_output=True).stdout)
    subprocess.run(["javac", "-cp", netty(tmp_path), "-d", tmp_path, source], check=True)
    client = NETTY.replace("bootstrap.channel(EpollSocketChannel.class);", "SourcePorts.configure(bootstrap);")
    client = client.replace(
        "bootstrap.connect(url.getHost(), url.getPort())",
        "SourcePorts.connect(bootstrap, new java.net.InetSocketAddress(url.getHost(), url.getPort()))",
    )
    assert client.count("SourcePorts") == 2
    assert parities(server, tmp_path, client) == {0, 1}
