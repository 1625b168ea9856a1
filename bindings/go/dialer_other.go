//go:build !linux

package fourtuple

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"syscall"
)

// search is empty: the kernel chooses source ports.
type search struct{}

// Probe returns the support of this kernel for IP_LOCAL_PORT_RANGE, an option of Linux.
func Probe() (LocalPortRange, error) { return NotLinux, nil }

func (d *Dialer) choose() error { return d.choosePlain() }

func (d *Dialer) open(ctx context.Context, network string, destination netip.AddrPort) (*net.TCPConn, Report, error) {
	return d.openPlain(ctx, network, destination)
}

func (d *Dialer) control(ctx context.Context, network, address string, c syscall.RawConn) error {
	return d.controlPlain(ctx, network, address, c)
}

// set refuses the options: SO_REUSEPORT of other systems distributes no connections.
func (c ListenConfig) set(syscall.RawConn) error {
	return fmt.Errorf("SO_REUSEPORT and SO_BINDTODEVICE on %s: %w", runtime.GOOS, errors.ErrUnsupported)
}
