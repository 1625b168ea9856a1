package fourtuple

import (
	"io"
	"os"
	"strings"
	"sync"
	"syscall"
)

// Socket options that package syscall does not name.
const (
	ipBindAddressNoPort = 24 // SOL_IP
	ipLocalPortRange    = 51 // SOL_IP
	soNetnsCookie       = 71 // SOL_SOCKET
)

// known holds the results of Probe by network namespace.
var known struct {
	sync.Mutex
	found map[uint64]LocalPortRange
}

// Probe returns the support of this kernel for IP_LOCAL_PORT_RANGE. It probes once per network namespace; later calls return the
// stored result, except after Unproven.
//
// The release number of a kernel does not tell: 6.1.y has a backport of the option, but not the linear search of 6.8. The probe opens
// up to 40 connections to its own listener on 127.0.0.1 and resets them, so that no TIME_WAIT socket remains.
func Probe() (LocalPortRange, error) {
	namespace, err := namespaceCookie()
	if err != nil {
		// Without SO_NETNS_COOKIE (before Linux 5.14) namespaces cannot be distinguished, and no result is stored.
		return probe()
	}
	known.Lock()
	found, ok := known.found[namespace]
	known.Unlock()
	if ok {
		return found, nil
	}
	found, err = probe()
	if err == nil && found != Unproven {
		known.Lock()
		if known.found == nil {
			known.found = make(map[uint64]LocalPortRange)
		}
		known.found[namespace] = found
		known.Unlock()
	}
	return found, err
}

// namespaceCookie returns an id of the calling thread's network namespace that the host never reuses.
func namespaceCookie() (uint64, error) {
	fd, err := openTCP()
	if err != nil {
		return 0, err
	}
	defer syscall.Close(fd)
	// The value has 8 bytes, as the structure of this function.
	value, err := syscall.GetsockoptIPMreq(fd, syscall.SOL_SOCKET, soNetnsCookie)
	if err != nil {
		return 0, os.NewSyscallError("getsockopt SO_NETNS_COOKIE", err)
	}
	var cookie uint64
	for _, part := range [][4]byte{value.Multiaddr, value.Interface} {
		for _, octet := range part {
			cookie = cookie<<8 | uint64(octet)
		}
	}
	return cookie, nil
}

func openTCP() (int, error) {
	return syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC, 0)
}

// setWindow sets IP_LOCAL_PORT_RANGE. The error of a kernel without the option is ENOPROTOOPT.
func setWindow(fd int, window PortRange) error {
	packed := uint32(window.Low) | uint32(window.High)<<16
	return syscall.SetsockoptInt(fd, syscall.SOL_IP, ipLocalPortRange, int(int32(packed)))
}

func probe() (LocalPortRange, error) {
	fd, err := openTCP()
	if err != nil {
		return NotProbed, &ProbeError{Call: "socket", Err: err}
	}
	err = setWindow(fd, AllPorts())
	syscall.Close(fd)
	switch err {
	case nil:
	case syscall.ENOPROTOOPT:
		return Absent, nil
	default:
		return NotProbed, &ProbeError{Call: "setsockopt(IP_LOCAL_PORT_RANGE)", Err: err}
	}
	isLinear, failed := searchesLinearly()
	if failed == nil {
		if isLinear {
			return Linear, nil
		}
		return Parity, nil
	}
	switch failed.Err {
	case syscall.ENETUNREACH, syscall.ENETDOWN, syscall.EHOSTUNREACH, syscall.EADDRNOTAVAIL, syscall.EADDRINUSE:
		return Unproven, nil
	default:
		return NotProbed, failed
	}
}

// searchesLinearly reports whether connections with IP_LOCAL_PORT_RANGE get ports of both parities.
//
// Each connection is reset before the next, so that a range of a few ports is enough. A search by parity takes all ports of one parity
// first, and a few connections do not exhaust them. A linear search misses one parity in 40 tries with a probability of 2^-39; with 16
// tries, one of 32,768 processes takes it for a search by parity.
func searchesLinearly() (bool, *ProbeError) {
	const probes = 40
	listener, err := openTCP()
	if err != nil {
		return false, &ProbeError{Call: "socket", Err: err}
	}
	defer syscall.Close(listener)
	if err := syscall.Bind(listener, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return false, &ProbeError{Call: "bind", Err: err}
	}
	if err := syscall.Listen(listener, 2*probes); err != nil {
		return false, &ProbeError{Call: "listen", Err: err}
	}
	destination, err := syscall.Getsockname(listener)
	if err != nil {
		return false, &ProbeError{Call: "getsockname", Err: err}
	}
	var seen [2]bool
	for i := 0; i < probes && !(seen[0] && seen[1]); i++ {
		port, failed := probePort(destination)
		if failed != nil {
			return false, failed
		}
		seen[port&1] = true
	}
	return seen[0] && seen[1], nil
}

func probePort(destination syscall.Sockaddr) (int, *ProbeError) {
	fd, err := openTCP()
	if err != nil {
		return 0, &ProbeError{Call: "socket", Err: err}
	}
	defer syscall.Close(fd)
	if err := setWindow(fd, AllPorts()); err != nil {
		return 0, &ProbeError{Call: "setsockopt(IP_LOCAL_PORT_RANGE)", Err: err}
	}
	if err := resetOnClose(fd); err != nil {
		return 0, &ProbeError{Call: "setsockopt(SO_LINGER)", Err: err}
	}
	if err := syscall.Connect(fd, destination); err != nil && err != syscall.EINPROGRESS {
		return 0, &ProbeError{Call: "connect", Err: err}
	}
	local, err := syscall.Getsockname(fd)
	if err != nil {
		return 0, &ProbeError{Call: "getsockname", Err: err}
	}
	return int(addrPort(local).Port()), nil
}

func resetOnClose(fd int) error {
	return syscall.SetsockoptLinger(fd, syscall.SOL_SOCKET, syscall.SO_LINGER, &syscall.Linger{Onoff: 1, Linger: 0})
}

// readSysctl reads a sysctl of any length. The kernel returns a value to the first read(2) only, cut to the size of the buffer, and
// os.ReadFile begins with 512 bytes.
func readSysctl(path string) (string, error) {
	for size := 64 << 10; ; size *= 2 {
		file, err := os.Open(path)
		if err != nil {
			return "", err
		}
		buffer := make([]byte, size)
		n, err := file.Read(buffer)
		file.Close()
		if err != nil && err != io.EOF {
			return "", err
		}
		if n < size {
			return string(buffer[:n]), nil
		}
	}
}

// reservedIn returns the number of ports of the range that net.ipv4.ip_local_reserved_ports excludes from an automatic choice.
func reservedIn(ports PortRange) (uint32, error) {
	var count uint32
	err := eachReserved(func(reserved PortRange) {
		low, high := max(reserved.Low, ports.Low), min(reserved.High, ports.High)
		if low <= high {
			count += PortRange{Low: low, High: high}.Len()
		}
	})
	return count, err
}

// portSet is a set of ports, one bit each. A nil set is empty.
type portSet [1024]uint64

func (s *portSet) contains(port uint16) bool {
	return s != nil && s[port/64]&(1<<(port%64)) != 0
}

// reservedPorts returns the ports of net.ipv4.ip_local_reserved_ports.
func reservedPorts() (*portSet, error) {
	set := new(portSet)
	err := eachReserved(func(reserved PortRange) {
		for port := uint32(reserved.Low); port <= uint32(reserved.High); port++ {
			set[port/64] |= 1 << (port % 64)
		}
	})
	return set, err
}

// eachReserved passes each range of net.ipv4.ip_local_reserved_ports.
func eachReserved(found func(PortRange)) error {
	text, err := readSysctl("/proc/sys/net/ipv4/ip_local_reserved_ports")
	if err != nil {
		return err
	}
	for _, part := range strings.FieldsFunc(strings.TrimSpace(text), func(c rune) bool { return c == ',' }) {
		if !strings.Contains(part, "-") {
			part += "-" + part
		}
		reserved, err := ParsePortRange(part)
		if err != nil {
			return err
		}
		found(reserved)
	}
	return nil
}
