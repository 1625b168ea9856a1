package fourtuple

import (
	"context"
	"net"
	"syscall"
)

// ListenConfig opens listeners with socket options that net.ListenConfig lacks. The zero value listens as package net does. The
// options need Linux: elsewhere they are errors.ErrUnsupported.
type ListenConfig struct {
	// ReusePort lets several sockets of one user listen on one address (SO_REUSEPORT). The kernel gives each connection to one of them,
	// by a hash of the 4-tuple.
	ReusePort bool
	// Device binds the socket to a network device or a VRF: setsockopt(SO_BINDTODEVICE).
	Device string
	// Net has the settings of package net. Its Control runs first.
	Net net.ListenConfig
}

// Listen opens a listener, as net.ListenConfig.Listen does.
func (c ListenConfig) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	config := c.Net
	config.Control = c.Control
	return config.Listen(ctx, network, address)
}

// ListenPacket opens a packet socket, as net.ListenConfig.ListenPacket does.
func (c ListenConfig) ListenPacket(ctx context.Context, network, address string) (net.PacketConn, error) {
	config := c.Net
	config.Control = c.Control
	return config.ListenPacket(ctx, network, address)
}

// ListenGroup opens n listeners on one address with SO_REUSEPORT, one for each worker. If the port of the address is 0, the kernel chooses
// one port for all.
//
// A connection stays with the listener that the kernel chose, also while its worker is busy; a listener that closes resets the
// connections in its accept queue, unless net.ipv4.tcp_migrate_req is 1.
func (c ListenConfig) ListenGroup(ctx context.Context, network, address string, n int) ([]net.Listener, error) {
	c.ReusePort = true
	group := make([]net.Listener, 0, max(n, 0))
	for len(group) < n {
		listener, err := c.Listen(ctx, network, address)
		if err != nil {
			for _, opened := range group {
				opened.Close()
			}
			return nil, err
		}
		group = append(group, listener)
		address = listener.Addr().String()
	}
	return group, nil
}

// Control sets the socket options. It is for programs that need a net.ListenConfig of their own.
func (c ListenConfig) Control(network, address string, conn syscall.RawConn) error {
	if c.Net.Control != nil {
		if err := c.Net.Control(network, address, conn); err != nil {
			return err
		}
	}
	if !c.ReusePort && c.Device == "" {
		return nil
	}
	return c.set(conn)
}
