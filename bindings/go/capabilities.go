package fourtuple

import "fmt"

// LocalPortRange is the support of a kernel for IP_LOCAL_PORT_RANGE (option 51 of SOL_IP).
type LocalPortRange uint8

const (
	// NotProbed: the caller chose the strategy.
	NotProbed LocalPortRange = iota
	// Absent: setsockopt(IP_LOCAL_PORT_RANGE) fails with ENOPROTOOPT: before Linux 6.3 without a backport, or refused by a filter.
	Absent
	// Parity: the kernel searches the window by parity: all ports of one parity, then the rest (Linux 6.3 to 6.7, and 6.1.y).
	Parity
	// Linear: the kernel searches the window port by port, from a start of either parity (Linux 6.8 and later).
	Linear
	// Unproven: the kernel has the option, but its search could not be probed: the loopback device is down, or no port is free for
	// the probe.
	Unproven
	// NotLinux: the option is Linux's. Elsewhere a net.Dialer opens the connections, and its kernel chooses the source port. Errors, names,
	// time limits, OnDial and ErrorSink are the same. A setting about source addresses, ports or devices is a ConfigError.
	NotLinux
)

// String returns the name that records use.
func (l LocalPortRange) String() string {
	names := [...]string{"not probed", "absent", "parity", "linear", "unproven", "not linux"}
	if int(l) < len(names) {
		return names[l]
	}
	return fmt.Sprintf("LocalPortRange(%d)", uint8(l))
}

// ProbeError is a failed probe. A kernel without support is a result, not an error.
type ProbeError struct {
	// Call is the call that failed.
	Call string
	// Err is the error of the call.
	Err error
}

func (e *ProbeError) Error() string {
	return fmt.Sprintf("cannot find out what this kernel can do: %s: %v", e.Call, e.Err)
}

// Unwrap returns the error of the call.
func (e *ProbeError) Unwrap() error { return e.Err }
