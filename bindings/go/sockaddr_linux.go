package fourtuple

import (
	"net"
	"net/netip"
	"strconv"
	"syscall"
)

// sockaddr returns the address for system calls.
func sockaddr(address netip.AddrPort) (syscall.Sockaddr, error) {
	ip := address.Addr()
	if ip.Is4() {
		return &syscall.SockaddrInet4{Port: int(address.Port()), Addr: ip.As4()}, nil
	}
	result := &syscall.SockaddrInet6{Port: int(address.Port()), Addr: ip.As16()}
	if zone := ip.Zone(); zone != "" {
		if index, err := strconv.ParseUint(zone, 10, 32); err == nil {
			result.ZoneId = uint32(index)
			return result, nil
		}
		device, err := net.InterfaceByName(zone)
		if err != nil {
			return nil, err
		}
		result.ZoneId = uint32(device.Index)
	}
	return result, nil
}

// addrPort returns the address of a system call, without a zone. An address of another family is not valid.
func addrPort(address syscall.Sockaddr) netip.AddrPort {
	switch address := address.(type) {
	case *syscall.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(address.Addr), uint16(address.Port))
	case *syscall.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(address.Addr).Unmap(), uint16(address.Port))
	default:
		return netip.AddrPort{}
	}
}
