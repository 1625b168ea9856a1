package fourtuple

import (
	"fmt"
	"strconv"
	"strings"
)

// Strategy is a way to choose a source port: a pure function of the number of tries, the port range and a random number generator.
// The Dialer makes the system calls. The strategies of this package return the same steps as the Rust library; bindings/vectors has
// the cases that both are tested with.
type Strategy interface {
	// Next returns the next step after the ports of tried steps were in use. If it returns false, the dial fails.
	Next(tried uint32, ports PortRange, random *Random) (Step, bool)
	// String returns the name that ParseStrategy reads.
	String() string
}

// StepKind says how a step gets a source port.
type StepKind uint8

const (
	// Search: connect() searches the range of the namespace, ports of one parity first, then ports of the other parity.
	Search StepKind = iota
	// Window: connect() searches the window of the step (IP_LOCAL_PORT_RANGE); since Linux 6.8 port by port.
	Window
	// Bind: bind() to the port of the step with SO_REUSEADDR, then connect().
	Bind
)

// Step is an attempt of a dial to get a source port.
type Step struct {
	Kind StepKind
	// Window is the range to search, for the kind Window.
	Window PortRange
	// Port is the port to bind, for the kind Bind.
	Port uint16
}

// Auto probes the kernel and takes the best strategy for it: see Choice. It is the strategy of a Config without one.
type Auto struct{}

// Next panics: a Dialer replaces Auto by another strategy when it is made.
func (Auto) Next(uint32, PortRange, *Random) (Step, bool) {
	panic("fourtuple: Auto must be replaced by the strategy that it chooses")
}

// String returns "auto".
func (Auto) String() string { return "auto" }

// On returns the strategy for a kernel with this support for IP_LOCAL_PORT_RANGE. portsKnown says whether the port range of the
// namespace could be read; without it no strategy can draw ports.
func (Auto) On(found LocalPortRange, portsKnown bool) Strategy {
	switch {
	case found == NotLinux:
		return KernelDefault{}
	case found == Linear, found != Absent && !portsKnown:
		return FullRange{}
	case found != Absent:
		// The last step searches the full range, so that the strategy works with either kind of search.
		return DefaultRandomWindow()
	case portsKnown:
		return DefaultSelectTestRepeat()
	default:
		return KernelDefault{}
	}
}

// ParseStrategy returns the strategy with this name: kernel-default, select-test-repeat, random-window, random-window:WIDTH,
// full-range or auto.
func ParseStrategy(name string) (Strategy, error) {
	switch name {
	case "auto":
		return Auto{}, nil
	case "kernel-default":
		return KernelDefault{}, nil
	case "full-range":
		return FullRange{}, nil
	case "select-test-repeat":
		return DefaultSelectTestRepeat(), nil
	case "random-window":
		return DefaultRandomWindow(), nil
	}
	if width, found := strings.CutPrefix(name, "random-window:"); found {
		if number, err := strconv.ParseUint(width, 10, 16); err == nil && number > 0 {
			strategy := DefaultRandomWindow()
			strategy.Width = uint16(number)
			return strategy, nil
		}
	}
	return nil, fmt.Errorf("%q is not a port strategy: expected kernel-default, select-test-repeat, random-window:WIDTH "+
		"(1 to 65535), full-range or auto", name)
}
