package fourtuple

import "syscall"

// Plan 9 has texts for errors and no numbers.
const (
	errRefused  = syscall.ErrorString("connection refused")
	errTimedOut = syscall.ErrorString("connection timed out")
	noPort      = syscall.ErrorString("no free ports")
)

var temporaryErrors []syscall.ErrorString
