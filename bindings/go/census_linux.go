package fourtuple

import (
	"encoding/binary"
	"net/netip"
	"os"
	"syscall"
)

// Constants of linux/sock_diag.h and linux/inet_diag.h.
const (
	netlinkSockDiag      = 4
	sockDiagByFamily     = 20
	inetDiagReqBytecode  = 1
	inetDiagBCSourceCond = 7
	inetDiagBCDestCond   = 8

	stateEstablished = 1
	stateTimeWait    = 6
)

// takeCensus counts the sockets of all processes from source to destination; a source that is not valid stands for all sources. It takes
// about 1.2 us for each socket.
func takeCensus(source netip.Addr, destination netip.AddrPort, ports PortRange) (*Census, error) {
	reserved, err := reservedIn(ports)
	if err != nil {
		return nil, err
	}
	census := &Census{Ports: ports.Len() - reserved}
	families := []uint8{syscall.AF_INET6}
	if destination.Addr().Is4() {
		// IPv6 sockets with v4-mapped addresses share the tables of IPv4, but are listed under their own family.
		families = []uint8{syscall.AF_INET, syscall.AF_INET6}
	}
	for _, family := range families {
		if err := dumpStates(family, source, destination, census.add); err != nil {
			return nil, err
		}
	}
	return census, nil
}

func (c *Census) add(state uint8) {
	switch state {
	case stateEstablished:
		c.Established++
	case stateTimeWait:
		c.TimeWait++
	default:
		c.Other++
	}
}

// held returns the number of ports in use, as far as the census counts them.
func (c *Census) held() uint32 { return c.Established + c.TimeWait + c.Other }

// dumpStates passes the state of each TCP socket of this family and tuple.
func dumpStates(family uint8, source netip.Addr, destination netip.AddrPort, found func(state uint8)) error {
	fd, err := syscall.Socket(syscall.AF_NETLINK, syscall.SOCK_RAW|syscall.SOCK_CLOEXEC, netlinkSockDiag)
	if err != nil {
		return os.NewSyscallError("socket(NETLINK_SOCK_DIAG)", err)
	}
	defer syscall.Close(fd)
	if err := syscall.Sendto(fd, diagRequest(family, source, destination), 0, &syscall.SockaddrNetlink{Family: syscall.AF_NETLINK}); err != nil {
		return os.NewSyscallError("sendto(NETLINK_SOCK_DIAG)", err)
	}
	buffer := make([]byte, 64<<10)
	for {
		n, _, err := syscall.Recvfrom(fd, buffer, 0)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return os.NewSyscallError("recvfrom(NETLINK_SOCK_DIAG)", err)
		}
		messages, err := syscall.ParseNetlinkMessage(buffer[:n])
		if err != nil {
			return os.NewSyscallError("recvfrom(NETLINK_SOCK_DIAG)", err)
		}
		for _, message := range messages {
			switch message.Header.Type {
			case syscall.NLMSG_DONE:
				return nil
			case syscall.NLMSG_ERROR:
				return os.NewSyscallError("sock_diag", replyErrno(message.Data))
			case sockDiagByFamily:
				// struct inet_diag_msg begins with the family and the state.
				if len(message.Data) > 1 {
					found(message.Data[1])
				}
			}
		}
	}
}

// replyErrno returns the errno of a struct nlmsgerr.
func replyErrno(data []byte) syscall.Errno {
	if len(data) < 4 {
		return syscall.EBADMSG
	}
	return syscall.Errno(-int32(binary.NativeEndian.Uint32(data)))
}

// diagRequest returns a dump request: struct nlmsghdr, struct inet_diag_req_v2, and an attribute with conditions.
func diagRequest(family uint8, source netip.Addr, destination netip.AddrPort) []byte {
	conditions := [][]byte{diagCondition(inetDiagBCDestCond, destination.Addr(), int32(destination.Port()))}
	if source.IsValid() {
		conditions = append(conditions, diagCondition(inetDiagBCSourceCond, source, -1))
	}
	rest := 0
	for _, condition := range conditions {
		rest += len(condition)
	}
	var program []byte
	for _, condition := range conditions {
		// A condition that does not hold jumps past the end, which excludes the socket.
		binary.NativeEndian.PutUint16(condition[2:], uint16(rest+4))
		rest -= len(condition)
		program = append(program, condition...)
	}
	const header, request, attribute = 16, 56, 4
	message := make([]byte, header+request+attribute, header+request+attribute+len(program))
	message = append(message, program...)
	order := binary.NativeEndian
	order.PutUint32(message, uint32(len(message)))
	order.PutUint16(message[4:], sockDiagByFamily)
	order.PutUint16(message[6:], syscall.NLM_F_REQUEST|syscall.NLM_F_DUMP)
	body := message[header:]
	body[0], body[1] = family, syscall.IPPROTO_TCP
	order.PutUint32(body[4:], ^uint32(0)) // all states
	order.PutUint16(body[request:], uint16(attribute+len(program)))
	order.PutUint16(body[request+2:], inetDiagReqBytecode)
	return message
}

// diagCondition returns a struct inet_diag_bc_op and a struct inet_diag_hostcond. The port -1 stands for all ports.
func diagCondition(code uint8, address netip.Addr, port int32) []byte {
	octets := address.AsSlice()
	family := uint8(syscall.AF_INET6)
	if address.Is4() {
		family = syscall.AF_INET
	}
	condition := make([]byte, 12, 12+len(octets))
	condition = append(condition, octets...)
	condition[0], condition[1] = code, uint8(len(condition))
	condition[4], condition[5] = family, uint8(8*len(octets))
	binary.NativeEndian.PutUint32(condition[8:], uint32(port))
	return condition
}
