use crate::print::snapshot::Snapshot;
use crate::print::template::{fill, heading, lines, why_no_option};

pub(super) fn text(snapshot: &Snapshot) -> String {
    let sources = if snapshot.binds() { snapshot.sources.as_slice() } else { &[] };
    let range = match why_no_option(snapshot.option) {
        Some(reason) => format!("    # {reason}\n"),
        None => RANGE.to_owned(),
    };
    fill(
        TEMPLATE,
        &[
            ("heading", &heading(snapshot, "#")),
            ("destination", &snapshot.destination().to_string()),
            ("note", snapshot.example_note()),
            ("sources", &lines(sources, |_, source| format!("    \"{source}\","))),
            ("range", &range),
            ("kept", &(snapshot.half() / 2).clamp(1, 256).to_string()),
        ],
    )
}

const RANGE: &str = "    # IP_LOCAL_PORT_RANGE with 0xFFFF0000: the whole range, searched port by port instead of by parity, so that the search stays\n    \
# short beyond half of the ports. In bytes, because the number is too large for an int of C.\n    \
(socket.SOL_IP, 51, struct.pack(\"=I\", 0xFFFF0000)),\n";

const TEMPLATE: &str = r#"# Python, source ports toward @destination@@note@.
@heading@import asyncio
import itertools
import socket
import struct

# Source addresses of this host, used in turn; each has its own ports. None: the kernel chooses the address.
SOURCES = [
@sources@]

# Set before bind() and connect(); afterwards they have no effect.
SOCKET_OPTIONS = [
    # IP_BIND_ADDRESS_NO_PORT: connect() chooses the port, not bind(), so that destinations share ports.
    (socket.SOL_IP, 24, 1),
@range@    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
]

_turn = itertools.cycle(SOURCES or [None])


def open_socket(family=socket.AF_INET):
    """Return a TCP socket with the options, bound to the next source address."""
    opened = socket.socket(family, socket.SOCK_STREAM)
    for option in SOCKET_OPTIONS:
        opened.setsockopt(*option)
    source = next(_turn)
    if source is not None:
        opened.bind((source, 0))
    return opened


async def open_connection(host, port, **options):
    """Like asyncio.open_connection(), whose local_addr would bind without IP_BIND_ADDRESS_NO_PORT."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    opened = open_socket(family)
    opened.setblocking(False)
    try:
        await loop.sock_connect(opened, address)
    except BaseException:
        opened.close()
        raise
    return await asyncio.open_connection(sock=opened, **options)


def aiohttp_connector(**options):
    """Return a connector for aiohttp.ClientSession; aiohttp 3.12 or later."""
    import aiohttp

    # limit is 100 connections by default; kept connections need no port.
    return aiohttp.TCPConnector(socket_factory=lambda info: open_socket(info[0]), **options)


def urllib3_pool(**options):
    """Return a urllib3.PoolManager, which sets the options before connect()."""
    import urllib3

    # A manager has one source address. The default keeps 1 connection for each destination.
    source = next(_turn)
    if source is not None:
        options.setdefault("source_address", (source, 0))
    return urllib3.PoolManager(socket_options=SOCKET_OPTIONS, maxsize=@kept@, **options)


def requests_session():
    """Return a requests.Session whose connections have the options."""
    import requests
    import requests.adapters

    class Adapter(requests.adapters.HTTPAdapter):
        def init_poolmanager(self, *arguments, **options):
            options["socket_options"] = SOCKET_OPTIONS
            source = next(_turn)
            if source is not None:
                options["source_address"] = (source, 0)
            super().init_poolmanager(*arguments, **options)

    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, Adapter(pool_maxsize=@kept@))
    return session


# What cannot be done: httpx (httpcore) sets socket_options after connect(), too late for ports, and its local_address binds without
# IP_BIND_ADDRESS_NO_PORT, so that all destinations share one set of ports. Use it without local_address, and `fourtuple fix ports`.
"#;
