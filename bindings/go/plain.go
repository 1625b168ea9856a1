package fourtuple

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"syscall"
	"time"
)

// choosePlain leaves all dials to package net, for systems other than Linux.
func (d *Dialer) choosePlain() error {
	field := ""
	switch config := &d.config; {
	case len(config.Sources) > 0:
		field = "Sources"
	case config.Ports != PortRange{}:
		field = "Ports"
	case config.SourcePort != 0:
		field = "SourcePort"
	case config.Device != "":
		field = "Device"
	}
	switch d.config.Strategy.(type) {
	case nil, Auto, KernelDefault:
	default:
		field = "Strategy"
	}
	if field != "" {
		return &ConfigError{Field: field, Reason: fmt.Sprintf("needs Linux, and this is %s: leave it out", runtime.GOOS), Err: errors.ErrUnsupported}
	}
	d.choice = Choice{Strategy: KernelDefault{}, Found: NotLinux}
	return nil
}

// openPlain opens a connection to one address with package net.
func (d *Dialer) openPlain(ctx context.Context, network string, destination netip.AddrPort) (*net.TCPConn, Report, error) {
	begun := time.Now()
	dialer := d.config.Net
	dialer.Timeout, dialer.Deadline = 0, time.Time{} // in the context already
	conn, err := dialer.DialContext(ctx, network, destination.String())
	report := Report{Strategy: KernelDefault{}, Tries: 1}
	if err == nil {
		conn := conn.(*net.TCPConn)
		if local, ok := conn.LocalAddr().(*net.TCPAddr); ok {
			report.Source = unmap(local.AddrPort())
		}
		return conn, report, nil
	}
	op := net.OpError{Op: "dial", Net: network, Addr: net.TCPAddrFromAddrPort(destination), Err: err}
	var of *net.OpError
	if errors.As(err, &of) {
		op = *of
	}
	failure := &DialError{Kind: Failed, Call: "connect", Destination: destination, Strategy: report.Strategy}
	failure.handshake(op.Err, begun)
	if errors.Is(op.Err, noPort) {
		// The socket was not bound to a source, so the error has this one meaning.
		failure.Kind = PortsExhausted
	}
	op.Err = failure
	return nil, report, &op
}

// controlPlain calls the function of the user, which a net.Dialer with Dialer.Control does not know.
func (d *Dialer) controlPlain(ctx context.Context, network, address string, c syscall.RawConn) error {
	switch network {
	case "tcp4", "tcp6":
	default:
		return net.UnknownNetworkError(network)
	}
	return d.userControl(ctx, network, address, c)
}

// userControl calls the control function of Config.Net, if there is one.
func (d *Dialer) userControl(ctx context.Context, network, address string, c syscall.RawConn) error {
	if user := d.config.Net.ControlContext; user != nil {
		return user(ctx, network, address, c)
	}
	if user := d.config.Net.Control; user != nil {
		return user(network, address, c)
	}
	return nil
}
