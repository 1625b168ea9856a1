//go:build !mips && !mipsle && !mips64 && !mips64le

package fourtuple

// Package syscall has SO_REUSEPORT only for some architectures.
const soReusePort = 15 // SOL_SOCKET
