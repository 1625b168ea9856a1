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

// search is what a dialer needs to choose source ports.
type search struct {
	ports       PortRange
	isNarrowed  bool
	isAutomatic bool
	turn        atomic.Uint32
	paths       paths
	randomLock  sync.Mutex
	random      *Random

	// reserved has the reserved ports if the strategy binds ports by number. isAllReserved says that no other port is in the range.
	reserved      *portSet
	isAllReserved bool
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
	var seed [8]byte
	if _, err := rand.Read(seed[:]); err != nil {
		return &ProbeError{Call: "getrandom", Err: err}
	}
	d.random = NewRandom(binary.NativeEndian.Uint64(seed[:]))
	return nil
}

// control is ControlContext.
func (d *Dialer) control(ctx context.Context, network, address string, c syscall.RawConn) error {
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

// open opens a connection to one address.
func (d *Dialer) open(ctx context.Context, network string, destination netip.AddrPort) (*net.TCPConn, Report, error) {
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
			return conn.(*net.TCPConn), a.report(), nil
		}
		if errors.Is(err, errFreshSocket) {
			continue
		}
		var failure *DialError
		if errors.As(err, &failure) {
			return nil, a.report(), err
		}
		var op *net.OpError
		if !errors.As(err, &op) {
			op = &net.OpError{Op: "dial", Net: network, Addr: net.TCPAddrFromAddrPort(destination), Err: err}
		}
		failure = a.handshakeFailure(op.Err)
		if ctx.Err() != context.Canceled {
			a.lost(failure)
		}
		wrapped := *op
		wrapped.Err = failure
		return nil, a.report(), &wrapped
	}
}
