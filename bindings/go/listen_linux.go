package fourtuple

import (
	"os"
	"syscall"
)

// set sets the options of a socket.
func (c ListenConfig) set(conn syscall.RawConn) error {
	call, failed := "", error(nil)
	err := conn.Control(func(fd uintptr) {
		if c.ReusePort {
			call, failed = "setsockopt(SO_REUSEPORT)", syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, soReusePort, 1)
		}
		if c.Device != "" && failed == nil {
			call, failed = "setsockopt(SO_BINDTODEVICE)", syscall.BindToDevice(int(fd), c.Device)
		}
	})
	if err != nil {
		return err
	}
	return os.NewSyscallError(call, failed)
}
