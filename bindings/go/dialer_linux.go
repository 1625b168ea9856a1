package fourtuple

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Config has the settings of a Dialer. The zero value probes the kernel and leaves the source address to it.
type Config struct {
	// Strategy chooses source ports. Default: Auto.
	Strategy Strategy
	// Sources are the source addresses, used in turn: see ParseSources. A dial uses the sources of its destination's family. Default:
	// the kernel chooses the source address by route.
	Sources []netip.Addr
	// Ports is the range of source ports, within net.ipv4.ip_local_port_range. Default: that range.
	Ports PortRange
	// SourcePort is a fixed source port. The strategy is then not used.
	SourcePort uint16
	// Device binds sockets to a network device or a VRF: setsockopt(SO_BINDTODEVICE).
	Device string
	// WithoutCensus omits the count of sockets in errors about exhausted ports. A census takes about 1.2 us for each socket on the
	// destination, at most once per second.
	WithoutCensus bool
	// Net has the settings of package net: Timeout, Deadline, KeepAlive, FallbackDelay, Resolver, Control and ControlContext. LocalAddr
	// must be nil: Sources replaces it.
	Net net.Dialer
}

// Choice is the strategy of a Dialer, and how it was chosen.
type Choice struct {
	// Strategy is the strategy of dials. For Absent, found by Auto, dials use KernelDefault until half of the ports are in use.
	Strategy Strategy
	// Found is the result of the probe; NotProbed if the Config names a strategy.
	Found LocalPortRange
	// Ports is the range of source ports.
	Ports PortRange
}

// String returns the choice in words.
func (c Choice) String() string {
	if _, binds := c.Strategy.(SelectTestRepeat); binds && c.Found == Absent {
		return fmt.Sprintf("kernel-default up to half of the ports %v, then %v", c.Ports, c.Strategy)
	}
	return fmt.Sprintf("%v of the ports %v", c.Strategy, c.Ports)
}

// Dialer opens TCP connections. Its methods may be called by several goroutines at the same time. A dialer serves any number of
// destinations; it keeps no connections, starts no goroutine that outlives a dial, and changes nothing on the host.
//
// A dialer belongs to the network namespace in which New was called.
type Dialer struct {
	config      Config
	choice      Choice
	ports       PortRange
	isNarrowed  bool
	isAutomatic bool
	sources4    []netip.Addr
	sources6    []netip.Addr
	turn        atomic.Uint32
	paths       paths
	randomLock  sync.Mutex
	random      *Random

	// reserved has the reserved ports if the strategy binds ports by number. isAllReserved says that no other port is in the range.
	reserved      *portSet
	isAllReserved bool
}

// Report is the source of a connection, and the time it took to get it.
type Report struct {
	// Strategy is the strategy of the dial.
	Strategy Strategy
	// Source is the source address and port.
	Source netip.AddrPort
	// Tries is the number of bind() or connect() calls for a port, the successful one included.
	Tries uint32
	// Connect is the time in connect(), and in bind() to a port, over all tries. It does not include the handshake.
	Connect time.Duration
}

// New checks the settings, and probes the kernel if the strategy is Auto. The error is a *ConfigError or a *ProbeError.
func New(config Config) (*Dialer, error) {
	d := &Dialer{config: config}
	if err := d.check(); err != nil {
		return nil, err
	}
	d.config.Sources = append([]netip.Addr(nil), config.Sources...)
	for i, source := range d.config.Sources {
		source = source.Unmap()
		d.config.Sources[i] = source
		if source.Is4() {
			d.sources4 = append(d.sources4, source)
		} else {
			d.sources6 = append(d.sources6, source)
		}
	}
	if err := d.choose(); err != nil {
		return nil, err
	}
	var seed [8]byte
	if _, err := rand.Read(seed[:]); err != nil {
		return nil, &ProbeError{Call: "getrandom", Err: err}
	}
	d.random = NewRandom(binary.NativeEndian.Uint64(seed[:]))
	return d, nil
}

func (d *Dialer) check() error {
	config := &d.config
	if config.Net.LocalAddr != nil {
		return &ConfigError{Field: "Net.LocalAddr", Reason: "must be nil: package net would bind a second time; set Sources or SourcePort"}
	}
	if len(config.Device) > 15 {
		return &ConfigError{Field: "Device", Reason: fmt.Sprintf("%q is not the name of a network device: expected 1 to 15 bytes", config.Device)}
	}
	if len(config.Sources) > MostSources {
		return &ConfigError{Field: "Sources", Reason: fmt.Sprintf("%d addresses, accepted are at most %d", len(config.Sources), MostSources)}
	}
	if config.SourcePort != 0 && len(config.Sources) > 1 {
		return &ConfigError{Field: "SourcePort", Reason: "a fixed source port goes with at most one source address"}
	}
	seen := make(map[netip.Addr]bool, len(config.Sources))
	for _, source := range config.Sources {
		if !source.IsValid() || source.IsUnspecified() || seen[source.Unmap()] {
			return &ConfigError{Field: "Sources", Reason: fmt.Sprintf("%v is no address, stands for all addresses, or occurs twice", source)}
		}
		seen[source.Unmap()] = true
	}
	if config.Ports != (PortRange{}) && (config.Ports.Low == 0 || config.Ports.Low > config.Ports.High) {
		return &ConfigError{Field: "Ports", Reason: fmt.Sprintf("%v is no range of ports: expected 1 <= Low <= High", config.Ports)}
	}
	if checked, ok := config.Strategy.(interface{ check() error }); ok {
		if err := checked.check(); err != nil {
			return &ConfigError{Field: "Strategy", Reason: err.Error()}
		}
	}
	return nil
}

// choose sets the strategy and the range of ports.
func (d *Dialer) choose() error {
	ports, portsErr := LocalPorts()
	d.choice.Strategy = d.config.Strategy
	switch d.config.Strategy.(type) {
	case nil, Auto:
		found, err := Probe()
		if err != nil {
			return err
		}
		d.choice.Found = found
		d.choice.Strategy = Auto{}.On(found, portsErr == nil)
	}
	d.ports = ports
	_, searches := d.choice.Strategy.(KernelDefault)
	_, fullRange := d.choice.Strategy.(FullRange)
	if portsErr != nil {
		// Without /proc the kernel still clamps a window of all ports to its range.
		if !searches && !fullRange || d.config.Ports != (PortRange{}) {
			return &ConfigError{Field: "Ports", Reason: "cannot read the port range of this namespace", Err: portsErr}
		}
		d.ports = AllPorts()
	}
	if wanted := d.config.Ports; wanted != (PortRange{}) {
		if !ports.Contains(wanted.Low) || !ports.Contains(wanted.High) {
			// The kernel would ignore each bound outside of its range, and search all ports instead.
			return &ConfigError{Field: "Ports", Reason: fmt.Sprintf("%v is not within net.ipv4.ip_local_port_range, %v", wanted, ports)}
		}
		if searches {
			return &ConfigError{Field: "Ports", Reason: "KernelDefault sets no option, so it cannot keep to a range; use Auto"}
		}
		d.ports, d.isNarrowed = wanted, true
	}
	d.choice.Ports = d.ports
	if _, binds := d.choice.Strategy.(SelectTestRepeat); binds {
		reserved, err := reservedPorts()
		if err == nil {
			var count uint32
			count, err = reservedIn(d.ports)
			d.reserved, d.isAllReserved = reserved, count == d.ports.Len()
		}
		if err != nil {
			return &ConfigError{Field: "Ports", Reason: "cannot read the reserved ports of this namespace", Err: err}
		}
	}
	// Below half of the ports the kernel's own search may replace Auto's strategy, unless it has to keep to a range.
	d.isAutomatic = d.choice.Found != NotProbed && !d.isNarrowed
	return nil
}

// Choice returns the strategy of this dialer, and how it was chosen.
func (d *Dialer) Choice() Choice { return d.choice }

func (d *Dialer) sourcesFor(destination netip.Addr) []netip.Addr {
	if destination.Is4() {
		return d.sources4
	}
	return d.sources6
}

// Dial is DialContext without a context.
func (d *Dialer) Dial(network, address string) (net.Conn, error) {
	return d.DialContext(context.Background(), network, address)
}

// DialContext opens a connection, as net.Dialer.DialContext does: set it as DialContext of an http.Transport or as the dial function
// of a database driver. The networks are "tcp", "tcp4" and "tcp6"; unix sockets have no ports, and package net opens them.
//
// If a host name has several addresses, their families alternate, and the next address is tried after FallbackDelay or at once after
// a failure (RFC 8305).
//
// A failed dial to an address is a *net.OpError around a *DialError; if several addresses of a name failed, it is a *HostError around
// these errors. The dialer retries only when a port is in use or a source cannot be used. A refused or unanswered connection ends the
// dial.
func (d *Dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	switch network {
	case "tcp", "tcp4", "tcp6":
	case "unix", "unixpacket":
		return d.config.Net.DialContext(ctx, network, address)
	default:
		return nil, &net.OpError{Op: "dial", Net: network, Err: net.UnknownNetworkError(network)}
	}
	ctx, cancel := d.limit(ctx)
	defer cancel()
	if destination, err := netip.ParseAddrPort(address); err == nil && fits(network, destination.Addr()) {
		return connection(d.dial(ctx, network, destination))
	}
	host, destinations, err := d.resolve(ctx, network, address)
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Err: err}
	}
	if len(destinations) == 1 {
		return connection(d.dial(ctx, network, destinations[0]))
	}
	return connection(d.race(ctx, network, host, destinations))
}

// connection avoids a net.Conn that is not nil around a nil *net.TCPConn.
func connection(conn *net.TCPConn, _ Report, err error) (net.Conn, error) {
	if err != nil {
		return nil, err
	}
	return conn, nil
}

// ContextDialer returns DialContext for one network, as grpc.WithContextDialer and mysql.RegisterDialContext take it.
func (d *Dialer) ContextDialer(network string) func(ctx context.Context, address string) (net.Conn, error) {
	return func(ctx context.Context, address string) (net.Conn, error) {
		return d.DialContext(ctx, network, address)
	}
}

// DialTCP opens a connection to an address and reports its source port.
func (d *Dialer) DialTCP(ctx context.Context, destination netip.AddrPort) (*net.TCPConn, Report, error) {
	ctx, cancel := d.limit(ctx)
	defer cancel()
	return d.dial(ctx, "tcp", destination)
}

// ControlContext sets the socket options of the first step, binds the source, and calls connect() until a port is found. It is for
// programs that need a net.Dialer of their own: &net.Dialer{ControlContext: dialer.ControlContext}. Its LocalAddr must be nil.
//
// Prefer DialContext: a net.Dialer opens another socket only after EADDRNOTAVAIL, at most twice. So with SelectTestRepeat a dial ends after
// the third conflict in connect(), and a dial from a source without a route fails instead of using another source of the pool. A failed
// handshake is an error of package net, without a DialError.
func (d *Dialer) ControlContext(ctx context.Context, network, address string, c syscall.RawConn) error {
	switch network {
	case "tcp4", "tcp6":
	default:
		return net.UnknownNetworkError(network)
	}
	destination, err := netip.ParseAddrPort(address)
	if err != nil {
		return &net.AddrError{Err: err.Error(), Addr: address}
	}
	a, err := d.begin(unmap(destination))
	if err != nil {
		return err
	}
	err = a.control(ctx, network, address, c)
	if err == errFreshSocket {
		if a.last != nil && a.last.Kind != PortsExhausted {
			return a.last
		}
		// Package net tries again after this error.
		return os.NewSyscallError("connect", syscall.EADDRNOTAVAIL)
	}
	return err
}

// Control is ControlContext for net.Dialer.Control.
func (d *Dialer) Control(network, address string, c syscall.RawConn) error {
	return d.ControlContext(context.Background(), network, address, c)
}

// limit applies Timeout and Deadline to all steps of a dial.
func (d *Dialer) limit(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline := d.config.Net.Deadline
	if timeout := d.config.Net.Timeout; timeout != 0 {
		if end := time.Now().Add(timeout); deadline.IsZero() || end.Before(deadline) {
			deadline = end
		}
	}
	if deadline.IsZero() {
		return ctx, func() {}
	}
	return context.WithDeadline(ctx, deadline)
}

// dial opens a connection to one address.
func (d *Dialer) dial(ctx context.Context, network string, destination netip.AddrPort) (*net.TCPConn, Report, error) {
	destination = unmap(destination)
	a, err := d.begin(destination)
	if err != nil {
		return nil, Report{}, &net.OpError{Op: "dial", Net: network, Addr: net.TCPAddrFromAddrPort(destination), Err: err}
	}
	dialer := d.config.Net
	dialer.Timeout, dialer.Deadline = 0, time.Time{} // in the context already
	dialer.Control, dialer.ControlContext = nil, a.control
	for {
		conn, err := dialer.DialContext(ctx, network, destination.String())
		if err == nil {
			a.succeeded()
			return conn.(*net.TCPConn), Report{Strategy: a.strategy, Source: a.local, Tries: a.tries, Connect: a.connect}, nil
		}
		if errors.Is(err, errFreshSocket) {
			continue
		}
		var failure *DialError
		if errors.As(err, &failure) {
			return nil, Report{}, err
		}
		var op *net.OpError
		if !errors.As(err, &op) {
			op = &net.OpError{Op: "dial", Net: network, Addr: net.TCPAddrFromAddrPort(destination), Err: err}
		}
		cause := op.Err
		if errors.Is(cause, os.ErrDeadlineExceeded) {
			// The poller has the deadline of the context.
			cause = context.DeadlineExceeded
		}
		failure = a.handshakeFailure(cause)
		if ctx.Err() != context.Canceled {
			a.lost(failure)
		}
		wrapped := *op
		wrapped.Err = failure
		return nil, Report{}, &wrapped
	}
}

// unmap returns the address with the family of its socket, and loopback for the unspecified address, as package net does.
func unmap(address netip.AddrPort) netip.AddrPort {
	ip := address.Addr().Unmap()
	switch ip {
	case netip.IPv4Unspecified():
		ip = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	case netip.IPv6Unspecified():
		ip = netip.IPv6Loopback()
	}
	return netip.AddrPortFrom(ip, address.Port())
}
