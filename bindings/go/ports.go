package fourtuple

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// PortRange is a range of ports with both ends inclusive, as in net.ipv4.ip_local_port_range.
type PortRange struct {
	Low, High uint16
}

// AllPorts returns the range of all ports. As a window it means the full range of the namespace, because the kernel clamps windows to
// that range (inet_sk_get_local_port_range).
func AllPorts() PortRange {
	return PortRange{Low: 0, High: 65535}
}

// ParsePortRange parses "LOW-HIGH", and the two columns of /proc/sys/net/ipv4/ip_local_port_range.
func ParsePortRange(text string) (PortRange, error) {
	malformed := fmt.Errorf("%q is not a range of ports: expected LOW-HIGH, each from 0 to 65535, such as 32768-60999", text)
	columns := strings.FieldsFunc(text, func(c rune) bool { return c == '-' || c == ' ' || c == '\t' || c == '\n' })
	if len(columns) != 2 {
		return PortRange{}, malformed
	}
	low, err := strconv.ParseUint(columns[0], 10, 16)
	if err != nil {
		return PortRange{}, malformed
	}
	high, err := strconv.ParseUint(columns[1], 10, 16)
	if err != nil {
		return PortRange{}, malformed
	}
	if low > high {
		return PortRange{}, fmt.Errorf("the range %d-%d runs backwards: the first port must not be above the last", low, high)
	}
	return PortRange{Low: uint16(low), High: uint16(high)}, nil
}

// Len returns the number of ports.
func (p PortRange) Len() uint32 {
	return uint32(p.High) - uint32(p.Low) + 1
}

// Contains reports whether the port is in the range.
func (p PortRange) Contains(port uint16) bool {
	return p.Low <= port && port <= p.High
}

// String returns "LOW-HIGH".
func (p PortRange) String() string {
	return fmt.Sprintf("%d-%d", p.Low, p.High)
}

// LocalPorts returns the range of ephemeral ports of the network namespace. Elsewhere than on Linux there is no such file.
func LocalPorts() (PortRange, error) {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		return PortRange{}, err
	}
	return ParsePortRange(string(text))
}
