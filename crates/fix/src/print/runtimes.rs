//! The runtimes of Go, Python and Netty.

use crate::print::{Snapshot, fill, heading, lines, why_no_option};

pub(super) fn go(snapshot: &Snapshot) -> String {
    let sources = if snapshot.binds() { snapshot.sources.as_slice() } else { &[] };
    let range = match why_no_option(snapshot.option) {
        Some(reason) => format!("\t\t// {reason}\n"),
        None => GO_RANGE.to_owned(),
    };
    fill(
        GO,
        &[
            ("heading", &heading(snapshot, "//")),
            ("destination", &snapshot.destination().to_string()),
            ("note", snapshot.example_note()),
            ("sources", &lines(sources, |_, source| format!("\tnet.ParseIP(\"{source}\"),"))),
            ("range", &range),
            ("idle", &(snapshot.half() / 2).clamp(2, 256).to_string()),
        ],
    )
}

const GO_RANGE: &str = "\t\t// The whole range, searched port by port instead of by parity, so that the search stays short beyond half of the ports.\n\
\t\tfailed = syscall.SetsockoptInt(int(fd), syscall.SOL_IP, ipLocalPortRange, -0x10000) // 0xFFFF0000\n";

const GO: &str = r#"// Package sourceports: Go, source ports toward @destination@@note@.
// Use DialContext for plain connections and Transport for HTTP.
@heading@package sourceports

import (
	"context"
	"errors"
	"net"
	"net/http"
	"sync/atomic"
	"syscall"
	"time"
)

// Of level SOL_IP; package syscall has no names for them.
const (
	ipBindAddressNoPort = 24
	ipLocalPortRange    = 51
)

// Source addresses of this host, used in turn; each has its own ports. None: the kernel chooses the address.
var sources = []net.IP{
@sources@}

var turn atomic.Uint32

// control runs after socket() and before bind() and connect().
func control(_, _ string, connection syscall.RawConn) error {
	var failed error
	err := connection.Control(func(fd uintptr) {
		// connect() chooses the port, not bind(), so that destinations share ports.
		failed = syscall.SetsockoptInt(int(fd), syscall.SOL_IP, ipBindAddressNoPort, 1)
		if failed != nil {
			return
		}
@range@	})
	if err != nil {
		return err
	}
	// A kernel without an option still connects.
	if errors.Is(failed, syscall.ENOPROTOOPT) {
		return nil
	}
	return failed
}

// DialContext opens a TCP connection from the next source address.
func DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	dialer := net.Dialer{Timeout: 10 * time.Second, Control: control}
	if len(sources) > 0 {
		// Go tries only addresses of the destination that have the same IP version.
		dialer.LocalAddr = &net.TCPAddr{IP: sources[(turn.Add(1)-1)%uint32(len(sources))]}
	}
	return dialer.DialContext(ctx, network, address)
}

// Transport returns an http.Transport that keeps connections: a request on a kept connection needs no port.
func Transport() *http.Transport {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.DialContext = DialContext
	// The default keeps 2 for each destination and closes the others after the response, into TIME_WAIT.
	transport.MaxIdleConnsPerHost = @idle@
	transport.MaxIdleConns = 0
	return transport
}

// Read a response to its end and close it: otherwise the connection is not kept.
// Go 1.19 or later. UDP: neither option lets sockets share ports.
"#;

pub(super) fn python(snapshot: &Snapshot) -> String {
    let sources = if snapshot.binds() { snapshot.sources.as_slice() } else { &[] };
    let range = match why_no_option(snapshot.option) {
        Some(reason) => format!("    # {reason}\n"),
        None => PYTHON_RANGE.to_owned(),
    };
    fill(
        PYTHON,
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

const PYTHON_RANGE: &str = "    # IP_LOCAL_PORT_RANGE with 0xFFFF0000: the whole range, searched port by port instead of by parity, so that the search stays\n    \
# short beyond half of the ports. In bytes, because the number is too large for an int of C.\n    \
(socket.SOL_IP, 51, struct.pack(\"=I\", 0xFFFF0000)),\n";

const PYTHON: &str = r#"# Python, source ports toward @destination@@note@.
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

pub(super) fn netty(snapshot: &Snapshot) -> String {
    let sources = if snapshot.binds() { snapshot.sources.as_slice() } else { &[] };
    let (constant, option) = match why_no_option(snapshot.option) {
        Some(reason) => (String::new(), format!("        // {reason}\n")),
        None => (NETTY_CONSTANT.to_owned(), NETTY_OPTION.to_owned()),
    };
    let import =
        if constant.is_empty() { "" } else { "import io.netty.channel.unix.IntegerUnixChannelOption;\n" };
    fill(
        NETTY,
        &[
            ("heading", &heading(snapshot, "//")),
            ("destination", &snapshot.destination().to_string()),
            ("note", snapshot.example_note()),
            ("import", import),
            ("sources", &lines(sources, |_, source| format!("        \"{source}\","))),
            ("constant", &constant),
            ("option", &option),
        ],
    )
}

const NETTY_CONSTANT: &str = "
    // IP_LOCAL_PORT_RANGE: level SOL_IP, option 51.
    private static final IntegerUnixChannelOption LOCAL_PORT_RANGE =
        new IntegerUnixChannelOption(\"IP_LOCAL_PORT_RANGE\", 0, 51);
";

const NETTY_OPTION: &str = "        // 0xFFFF0000: the whole range, searched port by port instead of by parity, so that the search stays short beyond half.
        bootstrap.option(LOCAL_PORT_RANGE, 0xFFFF0000);
";

const NETTY: &str = r#"// Netty, source ports toward @destination@@note@. Needs netty-transport-native-epoll for Linux.
@heading@import io.netty.bootstrap.Bootstrap;
import io.netty.channel.ChannelFuture;
import io.netty.channel.epoll.EpollChannelOption;
import io.netty.channel.epoll.EpollSocketChannel;
@import@import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.util.concurrent.atomic.AtomicInteger;

public final class SourcePorts {
    // Source addresses of this host, used in turn; each has its own ports. None: the kernel chooses the address.
    private static final String[] SOURCES = {
@sources@    };
@constant@
    private static final AtomicInteger TURN = new AtomicInteger();

    private SourcePorts() {}

    /** Sets the channel and its options. The group of the bootstrap must be an EpollEventLoopGroup: NIO has no such options. */
    public static Bootstrap configure(Bootstrap bootstrap) {
        bootstrap.channel(EpollSocketChannel.class);
        // connect() chooses the port, not bind(), so that destinations share ports.
        bootstrap.option(EpollChannelOption.IP_BIND_ADDRESS_NO_PORT, true);
@option@        return bootstrap;
    }

    /** Connects from the next source address. */
    public static ChannelFuture connect(Bootstrap bootstrap, SocketAddress remote) {
        if (SOURCES.length == 0) {
            return bootstrap.connect(remote);
        }
        String source = SOURCES[Math.floorMod(TURN.getAndIncrement(), SOURCES.length)];
        return bootstrap.connect(remote, new InetSocketAddress(source, 0));
    }
}

// What Netty cannot do: these options with NioSocketChannel or the channels of the JDK. Netty logs an option that a channel does not have
// and goes on without it. `fourtuple fix ports` needs no change of the program.
"#;
