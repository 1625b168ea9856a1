use crate::print::snapshot::Snapshot;
use crate::print::template::{fill, heading, lines, why_no_option};

pub(super) fn text(snapshot: &Snapshot) -> String {
    let sources = if snapshot.binds() { snapshot.sources.as_slice() } else { &[] };
    let range = match why_no_option(snapshot.option) {
        Some(reason) => format!("\t\t// {reason}\n"),
        None => RANGE.to_owned(),
    };
    fill(
        TEMPLATE,
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

const RANGE: &str = "\t\t// The whole range, searched port by port instead of by parity, so that the search stays short beyond half of the ports.\n\
\t\tfailed = syscall.SetsockoptInt(int(fd), syscall.SOL_IP, ipLocalPortRange, -0x10000) // 0xFFFF0000\n";

const TEMPLATE: &str = r#"// Package sourceports: Go, source ports toward @destination@@note@.
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
