package fourtuple

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"unsafe"
)

// inside is set to the name of the test whose namespace the process is in, or to "all" for the namespace of the whole run.
const inside = "FOURTUPLE_TEST_IS_INSIDE"

func init() {
	// A child with Pdeathsig lives as long as the thread that started it.
	runtime.LockOSThread()
}

// TestMain runs the test binary in a network namespace, so that no test and no example sends a packet on the host.
func TestMain(m *testing.M) {
	if os.Getenv(inside) != "" {
		if err := setLoopbackUp(); err != nil {
			fmt.Fprintln(os.Stderr, "loopback:", err)
			os.Exit(1)
		}
		os.Exit(m.Run())
	}
	command := inNewNamespace("all", os.Args[1:]...)
	command.Stdin, command.Stdout, command.Stderr = os.Stdin, os.Stdout, os.Stderr
	err := command.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		os.Exit(0)
	case errors.As(err, &exit):
		os.Exit(exit.ExitCode())
	case errors.Is(err, syscall.EPERM):
		reason := fmt.Sprintf("no network namespace to be had: %v", err)
		if isRequired("netns") {
			fmt.Fprintln(os.Stderr, "the tests need netns, which FOURTUPLE_REQUIRE demands:", reason)
			os.Exit(1)
		}
		fmt.Fprintln(os.Stderr, "SKIPPED all tests of bindings/go (needs netns):", reason)
		os.Exit(0)
	default:
		fmt.Fprintln(os.Stderr, "cannot start the tests in a network namespace:", err)
		os.Exit(1)
	}
}

// inNewNamespace returns a command that runs this binary in a new network namespace; without root also in a user namespace.
func inNewNamespace(name string, arguments ...string) *exec.Cmd {
	command := exec.Command("/proc/self/exe", arguments...)
	command.Env = append(os.Environ(), inside+"="+name)
	command.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() != 0 {
		command.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		command.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		command.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	return command
}

// inNamespace runs the body of a test in a process and a network namespace of its own, with loopback up and nothing else in it.
func inNamespace(t *testing.T, body func()) {
	t.Helper()
	if os.Getenv(inside) == t.Name() {
		body()
		return
	}
	output, err := inNewNamespace(t.Name(), "-test.run=^"+t.Name()+"$", "-test.v").CombinedOutput()
	text := string(output)
	for _, line := range strings.Split(text, "\n") {
		if strings.HasPrefix(line, "SKIPPED ") {
			fmt.Fprintln(os.Stderr, line)
			t.Skip(line)
		}
	}
	if err != nil || !strings.Contains(text, "--- PASS: "+t.Name()) {
		t.Fatalf("%v\n%s", err, text)
	}
}

// isRequired tells whether FOURTUPLE_REQUIRE demands a need: by its name, or by "all" without "-name".
func isRequired(need string) bool {
	names := strings.Split(os.Getenv("FOURTUPLE_REQUIRE"), ",")
	return slices.Contains(names, need) || slices.Contains(names, "all") && !slices.Contains(names, "-"+need)
}

// skip reports a skipped test on standard error, or fails the test if FOURTUPLE_REQUIRE demands the need.
func skip(t *testing.T, need, reason string) {
	t.Helper()
	if isRequired(need) {
		t.Fatalf("%s needs %s, which FOURTUPLE_REQUIRE demands: %s", t.Name(), need, reason)
	}
	fmt.Fprintf(os.Stderr, "SKIPPED %s (needs %s): %s\n", t.Name(), need, reason)
	t.SkipNow()
}

// needsOption skips the test on a kernel without IP_LOCAL_PORT_RANGE.
func needsOption(t *testing.T) {
	t.Helper()
	if found := must(Probe())(t); found == Absent {
		skip(t, "ip_local_port_range", "this kernel has no option 51")
	}
}

func setLoopbackUp() error {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer syscall.Close(fd)
	// struct ifreq: the name of the device, and its flags.
	var request [40]byte
	copy(request[:], "lo")
	*(*uint16)(unsafe.Pointer(&request[syscall.IFNAMSIZ])) = syscall.IFF_UP | syscall.IFF_RUNNING
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), syscall.SIOCSIFFLAGS, uintptr(unsafe.Pointer(&request)))
	if errno != 0 {
		return errno
	}
	return nil
}

func setSysctl(t *testing.T, name, value string) {
	t.Helper()
	path := "/proc/sys/" + strings.ReplaceAll(name, ".", "/")
	if err := os.WriteFile(path, []byte(value), 0); err != nil {
		t.Fatal(err)
	}
}

// hideOption51 makes setsockopt(IP_LOCAL_PORT_RANGE) fail with ENOPROTOOPT in this process, as on a kernel without the option.
func hideOption51(t *testing.T) {
	t.Helper()
	const (
		loadWord, jumpIfEqual, ret = 0x20, 0x15, 0x06 // BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K
		number, level, option      = 0, 24, 32        // offsets in struct seccomp_data, little-endian
		allow, errno               = 0x7fff0000, 0x00050000
		setModeFilter, threadSync  = 1, 1
		noNewPrivileges            = 38
	)
	seccomp := map[string]uintptr{"amd64": 317, "arm64": 277}[runtime.GOARCH]
	if seccomp == 0 {
		skip(t, "seccomp", "no filter for "+runtime.GOARCH)
	}
	filter := []syscall.SockFilter{
		{Code: loadWord, K: number}, {Code: jumpIfEqual, Jf: 5, K: syscall.SYS_SETSOCKOPT},
		{Code: loadWord, K: level}, {Code: jumpIfEqual, Jf: 3, K: syscall.SOL_IP},
		{Code: loadWord, K: option}, {Code: jumpIfEqual, Jf: 1, K: ipLocalPortRange},
		{Code: ret, K: errno | uint32(syscall.ENOPROTOOPT)}, {Code: ret, K: allow},
	}
	program := syscall.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if _, _, errno := syscall.AllThreadsSyscall(syscall.SYS_PRCTL, noNewPrivileges, 1, 0); errno != 0 && errno != syscall.ENOTSUP {
		t.Fatal("prctl(PR_SET_NO_NEW_PRIVS): ", errno)
	}
	// Under cgo, which the race detector needs, AllThreadsSyscall is not supported: root needs no PR_SET_NO_NEW_PRIVS.
	if _, _, errno := syscall.Syscall(seccomp, setModeFilter, threadSync, uintptr(unsafe.Pointer(&program))); errno != 0 {
		t.Fatal("seccomp: ", errno)
	}
}

// listen returns the address of a listener without accept(): its accept queue holds the server side of connections without descriptors.
// The port is below the ranges that the tests set.
func listen(t *testing.T, address string, backlog int) netip.AddrPort {
	t.Helper()
	ip := netip.MustParseAddr(address)
	family := syscall.AF_INET6
	if ip.Is4() {
		family = syscall.AF_INET
	}
	fd := must(syscall.Socket(family, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0))(t)
	t.Cleanup(func() { syscall.Close(fd) })
	for port := uint16(4000); port < 5000; port++ {
		local := must(sockaddr(netip.AddrPortFrom(ip, port)))(t)
		if syscall.Bind(fd, local) == nil {
			if err := syscall.Listen(fd, backlog); err != nil {
				t.Fatal(err)
			}
			return netip.AddrPortFrom(ip, port)
		}
	}
	t.Fatal("no free port for the listener")
	return netip.AddrPort{}
}

// must returns a function that fails the test if there is an error, and returns the value.
func must[T any](value T, err error) func(t *testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
}

func openDescriptors(t *testing.T) int {
	t.Helper()
	return len(must(os.ReadDir("/proc/self/fd"))(t))
}
