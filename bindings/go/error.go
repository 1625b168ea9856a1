package fourtuple

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"time"
)

// Kind is the cause of a failed dial. Kinds are errors, so that errors.Is(err, fourtuple.PortsExhausted) finds the cause in the error of
// net/http or of a database driver.
//
// A kind depends on the failed call, because one errno has different meanings in different calls: EADDRNOTAVAIL of connect() means
// that the ports are exhausted, EADDRNOTAVAIL of bind() that the source is not an address of this host.
type Kind uint8

const (
	// Failed is any failure without a kind of its own: see Call and Err of the DialError.
	Failed Kind = iota
	// PortsExhausted: no source port is free.
	PortsExhausted
	// SourceNotLocal: the source is not an address of this host.
	SourceNotLocal
	// TupleBusy: the fixed source port is in use on this 4-tuple, or a socket without SO_REUSEADDR holds it.
	TupleBusy
	// Refused: the destination refused the connection (ECONNREFUSED).
	Refused
	// SelfConnect: the kernel chose the destination's address and port as the source and connected the socket to itself. This
	// happens when the destination is a local port in the ephemeral range without a listener.
	SelfConnect
	// TimedOut: the destination did not answer within the timeout of the dialer, of the context or of the kernel.
	TimedOut
	// NotSupported: the strategy needs a socket option that this kernel lacks.
	NotSupported
	// WrongFamily: the pool of sources has no address of the destination's family.
	WrongFamily
)

// Error returns the cause in words.
func (k Kind) Error() string {
	texts := [...]string{
		"the dial failed", "no source port is left", "the source is not an address of this host", "the 4-tuple is busy",
		"the destination refused the connection", "the socket connected to itself", "the destination did not answer in time",
		"this kernel lacks a socket option", "no source address of the family of the destination",
	}
	if int(k) < len(texts) {
		return texts[k]
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// DialError is a failed dial to one address. Dialer.DialContext returns it inside a *net.OpError, as package net does, so use errors.As.
type DialError struct {
	// Kind is the cause.
	Kind Kind
	// Call is the system call that failed, or "setsockopt(OPTION)".
	Call string
	// Source is the source address, if one was set.
	Source netip.Addr
	// SourcePort is the fixed source port of TupleBusy.
	SourcePort uint16
	// Destination is the destination.
	Destination netip.AddrPort
	// Strategy is the strategy of the dial.
	Strategy Strategy
	// Census counts the sockets that hold the ports, for PortsExhausted. It is nil if CensusErr is set or the Config omits it.
	Census *Census
	// CensusErr is the failure to list the sockets of the kernel.
	CensusErr error
	// After is the duration of the dial, for TimedOut.
	After time.Duration
	// Err is the error of the call: a *os.SyscallError with the errno, or the error of the context.
	Err error
}

// Census is a count of the sockets that hold the ports towards a destination, from sock_diag(7).
type Census struct {
	// Ports is the number of ports that an automatic choice can take from one source: the range without reserved ports.
	Ports uint32
	// Established is the number of sockets towards the destination in state ESTABLISHED.
	Established uint32
	// TimeWait is the number of sockets towards the destination in state TIME_WAIT.
	TimeWait uint32
	// Other is the number of sockets towards the destination in other states.
	Other uint32
}

func (e *DialError) Error() string {
	source := "the address the kernel chose"
	from := ""
	if e.Source.IsValid() {
		source = e.Source.String()
		from = " from " + source
	}
	switch e.Kind {
	case PortsExhausted:
		return fmt.Sprintf("no source port is left from %s: %s%s", source, e.holders(), e.words())
	case SourceNotLocal:
		return fmt.Sprintf("the source %s is not an address of this host; add it to a device%s", source, e.words())
	case TupleBusy:
		return fmt.Sprintf("the source port %d is busy towards the destination%s", e.SourcePort, e.words())
	case Refused:
		return fmt.Sprintf("the destination refused the connection%s: nothing listens there, or a firewall rejects it%s", from, e.words())
	case SelfConnect:
		return "no socket listens there: the kernel connected the socket to itself. Keep listening ports out of " +
			"net.ipv4.ip_local_port_range, or reserve them (net.ipv4.ip_local_reserved_ports)"
	case TimedOut:
		return fmt.Sprintf("the destination did not answer%s within %v: %v", from, e.After.Round(100*time.Microsecond), e.Err)
	case NotSupported:
		return fmt.Sprintf("the strategy %v needs %s, which this kernel has not got; use Auto: %v", e.Strategy, e.Call, e.Err)
	case WrongFamily:
		return "the pool of sources has no address of this family"
	default:
		return fmt.Sprintf("failed%s: %v", from, e.Err)
	}
}

// words returns the error of the call: alerts search for the words of the kernel, such as "connection refused".
func (e *DialError) words() string {
	if e.Err == nil {
		return ""
	}
	return fmt.Sprintf(" (%v)", e.Err)
}

func (e *DialError) holders() string {
	switch {
	case e.Census != nil:
		c := e.Census
		return fmt.Sprintf("of %d ports %d are established, %d in TIME_WAIT, %d in other states", c.Ports, c.Established, c.TimeWait, c.Other)
	case e.CensusErr != nil:
		return fmt.Sprintf("the sockets that hold the ports cannot be listed (%v)", e.CensusErr)
	default:
		return "the sockets that hold the ports were not counted"
	}
}

// Is reports whether the target is the kind of the error.
func (e *DialError) Is(target error) bool {
	kind, ok := target.(Kind)
	return ok && kind == e.Kind
}

// handshake sets the kind for an error of package net, or of connect(), that has nothing to do with ports.
func (e *DialError) handshake(err error, begun time.Time) {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		// The poller has the deadline of the context.
		err = context.DeadlineExceeded
	}
	e.Err = err
	switch {
	case errors.Is(err, errRefused):
		e.Kind = Refused
	case errors.Is(err, errTimedOut), errors.Is(err, context.DeadlineExceeded):
		e.Kind = TimedOut
		e.After = time.Since(begun)
	}
}

// Unwrap returns the error of the call.
func (e *DialError) Unwrap() error { return e.Err }

// Timeout reports whether the destination did not answer in time.
func (e *DialError) Timeout() bool { return e.Kind == TimedOut }

// Temporary does the same as Retryable. Package net asks for this method.
func (e *DialError) Temporary() bool { return e.Retryable() }

// Exhausted reports whether no source port was free. More source addresses, a wider port range or fewer connections to this destination
// avoid the error; a retry helps when connections close.
func (e *DialError) Exhausted() bool { return e.Kind == PortsExhausted }

// Retryable reports whether the same dial may succeed later without a change of the settings or of the host's configuration: a port may
// become free, the destination may answer, or the host may get descriptors, memory or a route.
func (e *DialError) Retryable() bool {
	switch e.Kind {
	case PortsExhausted, TupleBusy, Refused, SelfConnect, TimedOut:
		return true
	case Failed:
		for _, temporary := range temporaryErrors {
			if errors.Is(e.Err, temporary) {
				return true
			}
		}
	}
	return false
}

// Exhausted reports whether a dial failed because no source port was free; other errors may be around its DialError.
func Exhausted(err error) bool { return errors.Is(err, PortsExhausted) }

// Retryable reports whether a failed dial may succeed later without a change of the settings: DialError.Retryable of the error of at
// least one address.
func Retryable(err error) bool {
	var host *HostError
	if errors.As(err, &host) {
		for _, one := range host.Errors {
			if Retryable(one) {
				return true
			}
		}
		return false
	}
	var dial *DialError
	return errors.As(err, &dial) && dial.Retryable()
}

// ErrorSink keeps the last error of a dial function, for libraries that make text of it, such as gRPC. The zero value is ready. Its methods
// may be called by several goroutines.
type ErrorSink struct {
	last atomic.Pointer[error]
}

// Dialer returns a dial function that does the same as dial and keeps its error. A dial that succeeds removes the error.
func (s *ErrorSink) Dialer(dial func(context.Context, string) (net.Conn, error)) func(context.Context, string) (net.Conn, error) {
	return func(ctx context.Context, address string) (net.Conn, error) {
		conn, err := dial(ctx, address)
		if err != nil {
			s.last.Store(&err)
		} else {
			s.last.Store(nil)
		}
		return conn, err
	}
}

// Last returns the error of the last dial; nil: it succeeded, or there was none. Exhausted and Retryable accept it.
func (s *ErrorSink) Last() error {
	if err := s.last.Load(); err != nil {
		return *err
	}
	return nil
}

// HostError is a failed dial to a host name with several addresses.
type HostError struct {
	// Host is the name.
	Host string
	// Errors are the errors of the addresses, in the order of the dials.
	Errors []error
}

func (e *HostError) Error() string {
	texts := make([]string, len(e.Errors))
	for i, err := range e.Errors {
		texts[i] = err.Error()
	}
	return fmt.Sprintf("no address of %s can be dialed: %s", e.Host, strings.Join(texts, "; "))
}

// Unwrap returns the errors of the addresses.
func (e *HostError) Unwrap() []error { return e.Errors }

// Timeout reports whether no address answered in time.
func (e *HostError) Timeout() bool {
	for _, err := range e.Errors {
		if timeout, ok := err.(interface{ Timeout() bool }); !ok || !timeout.Timeout() {
			return false
		}
	}
	return true
}

// Temporary does the same as Retryable.
func (e *HostError) Temporary() bool { return Retryable(e) }

// ConfigError is an invalid setting of a Config.
type ConfigError struct {
	// Field is the name of the field.
	Field string
	// Reason says what is wrong, and which values are accepted.
	Reason string
	// Err is the cause, if there is one.
	Err error
}

func (e *ConfigError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("Config.%s: %s: %v", e.Field, e.Reason, e.Err)
	}
	return fmt.Sprintf("Config.%s: %s", e.Field, e.Reason)
}

// Unwrap returns the cause.
func (e *ConfigError) Unwrap() error { return e.Err }
