//go:build !windows && !plan9

package fourtuple

import "syscall"

const (
	errRefused  = syscall.ECONNREFUSED
	errTimedOut = syscall.ETIMEDOUT
	// noPort is the error of a connect() whose socket was not bound.
	noPort = syscall.EADDRNOTAVAIL
)

// temporaryErrors are errors after which the same dial may succeed.
var temporaryErrors = []syscall.Errno{
	syscall.ECONNABORTED, syscall.ECONNRESET, syscall.EHOSTUNREACH, syscall.EINTR, syscall.ENETDOWN, syscall.ENETUNREACH, syscall.ENOMEM,
	syscall.EAGAIN, syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS,
}
