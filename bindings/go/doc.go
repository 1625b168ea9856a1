// Package fourtuple opens TCP connections with a source port that is found quickly, and returns errors that name the cause.
//
// It does not pool connections, speak a protocol, start a goroutine that outlives a dial, or change a sysctl. It needs no cgo and no
// other module.
//
// A TCP socket without a port gets one in connect(). While more than half of the ports of net.ipv4.ip_local_port_range are in use
// towards the destination, an unchanged program makes the kernel search through all ports of one parity first: milliseconds for each
// connection. A [Dialer] probes the kernel and uses the option IP_LOCAL_PORT_RANGE, with which the search stays short. docs/dial.md and
// docs/go.md describe the strategies and the measurements.
//
//	dialer, err := fourtuple.New(fourtuple.Config{})
//	transport := &http.Transport{DialContext: dialer.DialContext}
//
// When no port is left, errors.Is(err, [PortsExhausted]) is true for the error of net/http, gRPC or a database driver, and the
// [DialError] in it says how many sockets hold the ports. [Retryable] tells temporary errors from permanent ones.
//
// If a kernel lacks an option that a strategy needs, the dial fails with [NotSupported]; no other strategy is used instead. [Auto] chooses
// by a probe, never by the version of the kernel.
//
// The search is Linux's. On other systems a net.Dialer opens the connections, and [Choice] says so: see [NotLinux].
package fourtuple

// Version is the version of the module and of the Rust crate with the same vectors.
const Version = "0.1.0"
