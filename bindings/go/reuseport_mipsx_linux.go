//go:build mips || mipsle || mips64 || mips64le

package fourtuple

import "syscall"

const soReusePort = syscall.SO_REUSEPORT
