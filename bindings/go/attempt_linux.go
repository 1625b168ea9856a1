package fourtuple

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"syscall"
	"time"
)

const (
	// mostTried is the number of sources that one dial tries before it fails.
	mostTried = 16
	// atOnce is the limit between two kinds of connect() errors. An error before it comes from a route or a rule of this host, so that
	// another source may succeed. A later error may come from the network, and another source would take as long again.
	atOnce = 100 * time.Millisecond
)

// errFreshSocket ends the control function of a socket that cannot be used again. The dialer opens another one.
var errFreshSocket = errors.New("the next try needs a new socket")

// attempt is a dial in progress to one address: the steps that it has tried, and its source.
type attempt struct {
	dialer      *Dialer
	destination netip.AddrPort
	remote      syscall.Sockaddr
	source      netip.Addr
	strategy    Strategy
	steps       uint32
	step        Step
	// begun is the start of the dial.
	begun time.Time
	// isBackedOff says whether the current source was backed off when it was chosen.
	isBackedOff   bool
	failedSources int
	// exhausted is the first error of a source without a free port. If all sources fail, the dial returns it.
	exhausted *DialError
	// last is the failure of the source before the current one.
	last *DialError
	// isBound says whether the current socket is bound to the source, window is its IP_LOCAL_PORT_RANGE.
	isBound bool
	window  *PortRange
	// isFresh says whether the next step needs a new socket.
	isFresh bool

	local   netip.AddrPort
	tries   uint32
	connect time.Duration
	err     *DialError
}

func (d *Dialer) begin(destination netip.AddrPort) (*attempt, error) {
	remote, err := sockaddr(destination)
	if err != nil {
		return nil, err
	}
	a := &attempt{dialer: d, destination: destination, remote: remote, begun: time.Now()}
	sources := d.sourcesFor(destination.Addr())
	switch {
	case len(sources) > 0:
		a.source, a.isBackedOff, _ = d.paths.choose(sources, d.turn.Add(1), destination, time.Time{}, a.begun)
	case len(d.config.Sources) > 0:
		a.err = a.failure(WrongFamily, "bind", nil)
		return a, nil
	}
	a.restart()
	return a, nil
}

// restart begins the steps for the current source, on a socket that is not bound.
func (a *attempt) restart() {
	a.steps = 0
	a.strategy = a.dialer.choice.Strategy
	if a.dialer.choice.Found == Absent && a.dialer.isAutomatic && !a.pastHalf() {
		// Without IP_LOCAL_PORT_RANGE a port must be bound by number, and no automatic choice takes such a port. While half of the
		// ports are free, the kernel's own search is as fast and has no such effect.
		a.strategy = KernelDefault{}
	}
	a.err = nil
	if !a.advance() {
		a.fail(a.failure(PortsExhausted, "connect", nil))
	}
}

// pastHalf reports whether half of the ports or more are in use. If the kernel cannot list its sockets, the strategy decides alone.
func (a *attempt) pastHalf() bool {
	if _, ok := a.strategy.(SelectTestRepeat); !ok {
		return true
	}
	census, err := a.dialer.paths.count(a.path(), a.dialer.ports, true)
	return err != nil || 2*census.held() >= census.Ports
}

func (a *attempt) path() path { return path{a.source, a.destination} }

// advance takes the next step of the strategy.
func (a *attempt) advance() bool {
	tried := a.steps
	a.steps++
	d := a.dialer
	if d.config.SourcePort != 0 {
		a.step = Step{Kind: Bind, Port: d.config.SourcePort}
		return tried == 0
	}
	d.randomLock.Lock()
	step, ok := a.strategy.Next(tried, d.ports, d.random)
	// bind() by number accepts reserved ports. A draw of such a port does not count as a try.
	for ok && step.Kind == Bind && d.reserved.contains(step.Port) {
		step, ok = a.strategy.Next(tried, d.ports, d.random)
		ok = ok && !d.isAllReserved
	}
	d.randomLock.Unlock()
	if step.Kind == Window && step.Window == AllPorts() && d.isNarrowed {
		step.Window = d.ports
	}
	a.step = step
	return ok
}

// control sets the options of a new socket and calls connect(). Package net calls connect() once more, which then only waits for the
// handshake.
func (a *attempt) control(ctx context.Context, network, address string, c syscall.RawConn) error {
	if err := a.dialer.userControl(ctx, network, address, c); err != nil {
		return err
	}
	err := c.Control(func(fd uintptr) { a.open(int(fd)) })
	switch {
	case err != nil:
		return err
	case a.err != nil:
		return a.err
	case a.isFresh:
		return errFreshSocket
	default:
		return nil
	}
}

// open connects a new socket. After it the attempt has an error, needs a fresh socket, or has called connect() with success.
func (a *attempt) open(fd int) {
	if a.err != nil {
		return
	}
	a.isBound, a.window, a.isFresh = false, nil, false
	if device := a.dialer.config.Device; device != "" {
		if err := syscall.BindToDevice(fd, device); err != nil {
			a.err = a.failure(Failed, "setsockopt(SO_BINDTODEVICE)", err)
			return
		}
	}
	for a.err == nil && !a.isFresh {
		if !a.apply(fd) {
			continue
		}
		begun := time.Now()
		err := syscall.Connect(fd, a.remote)
		a.connect += time.Since(begun)
		switch err {
		case nil, syscall.EINPROGRESS, syscall.EINTR:
			a.tries++
			a.connected(fd)
			return
		case syscall.EADDRNOTAVAIL:
			a.tries++
			// A port bound by number stays bound.
			a.isFresh = a.step.Kind == Bind
			a.conflict("connect", err)
		default:
			a.refused(err)
		}
	}
}

// apply sets the options of the step. It returns false if they cannot be set; the attempt then has an error or another step.
func (a *attempt) apply(fd int) bool {
	switch a.step.Kind {
	case Window:
		if a.window == nil || *a.window != a.step.Window {
			if err := setWindow(fd, a.step.Window); err != nil {
				a.err = a.optionFailed("setsockopt(IP_LOCAL_PORT_RANGE)", err)
				return false
			}
			window := a.step.Window
			a.window = &window
		}
		return a.bindSource(fd)
	case Bind:
		return a.bindPort(fd)
	default:
		return a.bindSource(fd)
	}
}

func (a *attempt) optionFailed(call string, err error) *DialError {
	if err == syscall.ENOPROTOOPT {
		return a.failure(NotSupported, call, err)
	}
	return a.failure(Failed, call, err)
}

// bindSource binds the source address and leaves the port to connect(): only connect() can share one port among destinations.
func (a *attempt) bindSource(fd int) bool {
	if !a.source.IsValid() || a.isBound {
		return true
	}
	if err := syscall.SetsockoptInt(fd, syscall.SOL_IP, ipBindAddressNoPort, 1); err != nil {
		a.err = a.optionFailed("setsockopt(IP_BIND_ADDRESS_NO_PORT)", err)
		return false
	}
	if !a.bind(fd, 0) {
		return false
	}
	a.isBound = true
	return true
}

// bindPort binds the port of the step. After a conflict the next step can use the same socket.
func (a *attempt) bindPort(fd int) bool {
	if err := syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1); err != nil {
		a.err = a.failure(Failed, "setsockopt(SO_REUSEADDR)", err)
		return false
	}
	begun := time.Now()
	defer func() { a.connect += time.Since(begun) }()
	return a.bind(fd, a.step.Port)
}

func (a *attempt) bind(fd int, port uint16) bool {
	source := a.source
	if !source.IsValid() {
		source = netip.IPv6Unspecified()
		if a.destination.Addr().Is4() {
			source = netip.IPv4Unspecified()
		}
	}
	local, err := sockaddr(netip.AddrPortFrom(source, port))
	if err == nil {
		err = syscall.Bind(fd, local)
	}
	switch err {
	case nil:
		return true
	case syscall.EADDRINUSE:
		if port != 0 {
			a.tries++
			a.conflict("bind", err)
		} else {
			a.anotherSource(a.failure(PortsExhausted, "bind", err))
		}
	case syscall.EADDRNOTAVAIL:
		a.anotherSource(a.failure(SourceNotLocal, "bind", err))
	default:
		a.anotherSource(a.failure(Failed, "bind", err))
	}
	return false
}

// conflict continues after a port was in use: with the next step, or with another source.
func (a *attempt) conflict(call string, err error) {
	if a.advance() {
		return
	}
	if port := a.dialer.config.SourcePort; port != 0 {
		a.err = a.failure(TupleBusy, call, err)
		a.err.SourcePort = port
		return
	}
	a.isFresh = a.isFresh || a.isBound
	a.anotherSource(a.failure(PortsExhausted, call, err))
}

// refused continues after connect() failed with an error that has nothing to do with ports.
func (a *attempt) refused(err error) {
	failure := a.handshakeFailure(os.NewSyscallError("connect", err))
	switch err {
	case syscall.EACCES, syscall.EPERM, syscall.EINVAL, syscall.ENETUNREACH, syscall.EHOSTUNREACH, syscall.ENETDOWN:
		if a.connect < atOnce {
			// The socket is bound to the source.
			a.isFresh = true
			a.anotherSource(failure)
			return
		}
	}
	a.err = failure
	a.lost(failure)
}

// anotherSource continues the dial from another source of the pool, or ends it with an error.
func (a *attempt) anotherSource(failure *DialError) {
	isExhausted := failure.Kind == PortsExhausted
	if isExhausted && a.exhausted == nil {
		a.exhausted = failure
	}
	sources := a.dialer.sourcesFor(a.destination.Addr())
	if len(sources) < 2 {
		a.fail(failure)
		return
	}
	now := time.Now()
	a.dialer.paths.fail(a.path(), isExhausted, now)
	a.failedSources++
	// A search of all ports takes milliseconds, so a dial searches at most one source that was exhausted a moment ago.
	if a.failedSources >= mostTried || isExhausted && a.isBackedOff {
		a.fail(failure)
		return
	}
	source, isBackedOff, ok := a.dialer.paths.choose(sources, a.dialer.turn.Add(1), a.destination, a.begun, now)
	if !ok {
		a.fail(failure)
		return
	}
	a.source, a.isBackedOff, a.last = source, isBackedOff, failure
	a.restart()
}

// fail ends the dial. If a source had no free port, its error is the error of the dial.
func (a *attempt) fail(failure *DialError) {
	if a.exhausted != nil {
		failure = a.exhausted
	}
	a.err = failure
	if failure.Kind == PortsExhausted && !a.dialer.config.WithoutCensus {
		failure.Census, failure.CensusErr = a.dialer.paths.count(path{failure.Source, a.destination}, a.dialer.ports, false)
	}
}

// connected reads the source of a socket after connect() succeeded or is in progress.
func (a *attempt) connected(fd int) {
	local, err := syscall.Getsockname(fd)
	if err != nil {
		a.err = a.failure(Failed, "getsockname", err)
		return
	}
	a.local = addrPort(local)
	if a.local.Port() == a.destination.Port() && a.local.Addr() == a.destination.Addr().WithZone("") {
		// The socket is its own peer: a reset leaves no TIME_WAIT socket behind.
		if err := resetOnClose(fd); err != nil {
			a.err = a.failure(Failed, "setsockopt(SO_LINGER)", err)
			return
		}
		a.err = a.failure(SelfConnect, "connect", nil)
	}
}

// lost backs off a source whose handshake failed. A destination that refuses the connection was reached, so its source works.
func (a *attempt) lost(failure *DialError) {
	if failure.Kind != Refused && len(a.dialer.sourcesFor(a.destination.Addr())) > 1 {
		a.dialer.paths.fail(a.path(), false, time.Now())
	}
}

func (a *attempt) succeeded() {
	if len(a.dialer.config.Sources) > 1 {
		a.dialer.paths.succeed(a.path())
	}
}

func (a *attempt) failure(kind Kind, call string, err error) *DialError {
	failure := &DialError{Kind: kind, Call: call, Source: a.source, Destination: a.destination, Strategy: a.strategy}
	if err != nil {
		failure.Err = os.NewSyscallError(call, err)
	}
	return failure
}

// handshakeFailure turns an error of package net, or of connect(), into an error with a kind.
func (a *attempt) handshakeFailure(err error) *DialError {
	failure := a.failure(Failed, "connect", nil)
	failure.handshake(err, a.begun)
	return failure
}

// report returns what is known of the source: after a failure no address.
func (a *attempt) report() Report {
	return Report{Strategy: a.strategy, Source: a.local, Tries: a.tries, Connect: a.connect}
}
