package fourtuple

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"strconv"
	"strings"
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
	// OnDial is called at the end of each dial to an address, for metrics and logs, by the goroutine of the dial. Addresses of one name may
	// be dialed at the same time. Dials by ControlContext end in package net, so OnDial does not hear of them.
	OnDial func(context.Context, DialDone)
}

// DialDone is a dial that has ended: what Config.OnDial gets.
type DialDone struct {
	// Network is "tcp", "tcp4" or "tcp6".
	Network string
	// Destination is the address. A name with several addresses is dialed once for each, until one answers.
	Destination netip.AddrPort
	// Report has the strategy and the tries, and the source of a connection that succeeded.
	Report
	// Duration is the time of the dial, the handshake included.
	Duration time.Duration
	// Err is the failure; nil: there is a connection. A dial that lost the race to another address of its name has context.Canceled in it.
	Err error
}

// Choice is the strategy of a Dialer, and how it was chosen.
type Choice struct {
	// Strategy is the strategy of dials. For Absent, found by Auto, dials use KernelDefault until half of the ports are in use.
	Strategy Strategy
	// Found is the result of the probe; NotProbed if the Config names a strategy; NotLinux: package net opens the connections.
	Found LocalPortRange
	// Ports is the range of source ports. It is zero for NotLinux.
	Ports PortRange
}

// String returns the choice in words.
func (c Choice) String() string {
	if c.Found == NotLinux {
		return fmt.Sprintf("net.Dialer: the kernel of %s chooses the source port", runtime.GOOS)
	}
	if _, binds := c.Strategy.(SelectTestRepeat); binds && c.Found == Absent {
		return fmt.Sprintf("kernel-default up to half of the ports %v, then %v", c.Ports, c.Strategy)
	}
	return fmt.Sprintf("%v of the ports %v", c.Strategy, c.Ports)
}

// Dialer opens TCP connections. Its methods may be called by several goroutines at the same time. A dialer serves any number of
// destinations; it keeps no connections, starts no goroutine that outlives a dial, and changes nothing on the host.
//
// A dialer belongs to the network namespace in which New was called. Elsewhere than on Linux a net.Dialer opens the connections: see
// NotLinux.
type Dialer struct {
	config   Config
	choice   Choice
	sources4 []netip.Addr
	sources6 []netip.Addr
	search
}

// Report is the source of a connection, and the time it took to get it.
type Report struct {
	// Strategy is the strategy of the dial.
	Strategy Strategy
	// Source is the source address and port.
	Source netip.AddrPort
	// Tries is the number of bind() or connect() calls for a port, the successful one included.
	Tries uint32
	// Connect is the time in connect(), and in bind() to a port, over all tries. It does not include the handshake, and is 0 for NotLinux.
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

// ContextDialer returns DialContext for one network, as grpc.WithContextDialer and mysql.RegisterDialContext take it. Unix targets of gRPC
// ("unix:path", "unix:///path", "unix-abstract:name"), whose form it passes to such a function, are dialed as Unix sockets.
func (d *Dialer) ContextDialer(network string) func(ctx context.Context, address string) (net.Conn, error) {
	return func(ctx context.Context, address string) (net.Conn, error) {
		if path, ok := unixPath(address); ok {
			return d.DialContext(ctx, "unix", path)
		}
		return d.DialContext(ctx, network, address)
	}
}

// unixPath returns the path of a Unix target in the forms in which gRPC passes it: "unix://" and an absolute path, "unix:" and a relative
// path, or an abstract name after a null byte. A host may have the name unix: "unix:3306" is a TCP address.
func unixPath(address string) (string, bool) {
	if strings.HasPrefix(address, "\x00") {
		return address, true
	}
	path, ok := strings.CutPrefix(address, "unix:")
	if !ok {
		return "", false
	}
	if _, err := strconv.ParseUint(path, 10, 16); err == nil {
		return "", false
	}
	return strings.TrimPrefix(path, "//"), true
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
// handshake is an error of package net, without a DialError. For NotLinux it only calls the Control of Config.Net.
func (d *Dialer) ControlContext(ctx context.Context, network, address string, c syscall.RawConn) error {
	return d.control(ctx, network, address, c)
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

// dial opens a connection to one address and tells OnDial.
func (d *Dialer) dial(ctx context.Context, network string, destination netip.AddrPort) (*net.TCPConn, Report, error) {
	begun := time.Now()
	conn, report, err := d.open(ctx, network, unmap(destination))
	if d.config.OnDial != nil {
		d.config.OnDial(ctx, DialDone{network, unmap(destination), report, time.Since(begun), err})
	}
	return conn, report, err
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
