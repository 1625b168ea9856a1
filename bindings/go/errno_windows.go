package fourtuple

import "syscall"

// Errors of Winsock: the constants of package syscall with the names of Unix have other numbers on Windows.
const (
	errRefused  = syscall.Errno(10061) // WSAECONNREFUSED
	errTimedOut = syscall.Errno(10060) // WSAETIMEDOUT
	// noPort is WSAEADDRINUSE, the error of ConnectEx() when no port is left.
	noPort = syscall.Errno(10048)
)

// temporaryErrors are errors after which the same dial may succeed: WSAEINTR, WSAEMFILE, WSAENETDOWN, WSAENETUNREACH, WSAECONNABORTED,
// WSAECONNRESET, WSAENOBUFS and WSAEHOSTUNREACH.
var temporaryErrors = []syscall.Errno{10004, 10024, 10050, 10051, 10053, 10054, 10055, 10065}
