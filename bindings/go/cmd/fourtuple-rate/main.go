//go:build linux

// Command fourtuple-rate compares two clients of net/http, without and with the dialer of package fourtuple: new connections per second
// to an nginx, while most of the source ports to it are in use.
//
//	cd bindings/go && go run ./cmd/fourtuple-rate
//
// With -without and -with it compares two programs in any language, which connect to 127.0.0.1:4000 and print a line for each connection.
//
// It needs nginx, Linux 6.3 or later (IP_LOCAL_PORT_RANGE), about 400 MiB of memory, and root or a host that allows user namespaces. It
// makes a network namespace of its own, in which processes hold connections from all ports of the first parity and from 90% of the
// others, as after many connect() calls of an unmodified program. Trials of both clients alternate in the order A B B A. Each request
// is one connection.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"fourtuple.example/fourtuple"
)

// role is set in processes that this command starts: "inside" in the namespace, or "holder PART".
const role = "FOURTUPLE_RATE_ROLE"

// holders is the number of processes that hold connections: each has at most 20,000 descriptors.
const holders = 4

var destination = netip.MustParseAddrPort("127.0.0.1:4000")

type settings struct {
	ports    fourtuple.PortRange
	strategy fourtuple.Strategy
	trial    time.Duration
	blocks   int
	workers  int
	empty    bool
	// programs are commands to run instead of the clients of net/http, or empty.
	programs [2][]string
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "fourtuple-rate:", err)
		os.Exit(1)
	}
}

func run() error {
	ports := flag.String("ports", "9000-65511", "range of source ports of the namespace, from an even port on")
	strategy := flag.String("strategy", "auto", "strategy of the dialer")
	trial := flag.Duration("trial", 500*time.Millisecond, "duration of a trial")
	blocks := flag.Int("blocks", 6, "blocks of four trials")
	workers := flag.Int("workers", 4, "goroutines that send requests, one after the other each")
	empty := flag.Bool("empty", false, "hold no connections: the rate without a port search")
	without := flag.String("without", "", "a program to run instead of net/http, with its arguments; together with -with")
	with := flag.String("with", "", "the same program with the library")
	flag.Parse()
	given := settings{trial: *trial, blocks: *blocks, workers: *workers, empty: *empty}
	given.programs = [2][]string{strings.Fields(*without), strings.Fields(*with)}
	if (*without == "") != (*with == "") {
		return errors.New("-without and -with go together")
	}
	var err error
	if given.ports, err = fourtuple.ParsePortRange(*ports); err != nil {
		return fmt.Errorf("-ports: %w", err)
	}
	if given.strategy, err = fourtuple.ParseStrategy(*strategy); err != nil {
		return fmt.Errorf("-strategy: %w", err)
	}
	if given.blocks < 1 || given.workers < 1 || given.trial <= 0 {
		return errors.New("-blocks, -workers and -trial must be above 0")
	}
	name, part, _ := strings.Cut(os.Getenv(role), " ")
	switch name {
	case "holder":
		number, err := strconv.Atoi(part)
		if err != nil {
			return err
		}
		return hold(given.ports, number)
	case "inside":
		return measure(given)
	default:
		return enter()
	}
}

// again returns a command that runs this program in another role, and ends with it.
func again(as string) *exec.Cmd {
	command := exec.Command("/proc/self/exe", os.Args[1:]...)
	command.Env = append(os.Environ(), role+"="+as)
	command.Stderr = os.Stderr
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return command
}

// enter runs this program again in a new network namespace; without root also in a user namespace.
func enter() error {
	runtime.LockOSThread() // Pdeathsig is about the thread that starts the process
	command := again("inside")
	command.Stdout = os.Stdout
	command.SysProcAttr.Cloneflags = syscall.CLONE_NEWNET
	if os.Geteuid() != 0 {
		command.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		command.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		command.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	return command.Run()
}

func measure(given settings) error {
	runtime.LockOSThread()
	if err := prepare(given.ports); err != nil {
		return err
	}
	// The kernel prefers nginx's listener for new connections, because its address is exact. This one only holds connections.
	config := fourtuple.ListenConfig{ReusePort: true}
	listener, err := config.Listen(context.Background(), "tcp4", fmt.Sprintf("0.0.0.0:%d", destination.Port()))
	if err != nil {
		return err
	}
	defer listener.Close()
	held, stop := 0, func() {}
	if !given.empty {
		held, stop, err = startHolders()
	}
	defer stop()
	if err != nil {
		return err
	}
	total := int(given.ports.Len())
	fmt.Printf("%d of %d ports to %v are in use (%.1f%%)\n", held, total, destination, 100*float64(held)/float64(total))
	stopServer, err := startServer()
	if err != nil {
		return err
	}
	defer stopServer()
	dialer, err := fourtuple.New(fourtuple.Config{Strategy: given.strategy})
	if err != nil {
		return err
	}
	if len(given.programs[0]) == 0 {
		fmt.Printf("dialer: %v\n", dialer.Choice())
	}
	return compare(given, dialer)
}

func prepare(ports fourtuple.PortRange) error {
	ip, err := exec.LookPath("ip")
	if err != nil {
		return fmt.Errorf("iproute2 sets the loopback device up: %w", err)
	}
	if output, err := exec.Command(ip, "link", "set", "lo", "up").CombinedOutput(); err != nil {
		return fmt.Errorf("ip link set lo up: %w: %s", err, output)
	}
	for name, value := range map[string]string{
		"net/ipv4/ip_local_port_range": fmt.Sprintf("%d %d", ports.Low, ports.High),
		"net/core/somaxconn":           "65535",
	} {
		if err := os.WriteFile("/proc/sys/"+name, []byte(value), 0); err != nil {
			return err
		}
	}
	return nil
}

// hold opens one part of the connections, says so on stdout and keeps them until stdin ends. Each has a window of one port, so that its
// port is not bound by number, which would change the cost of the kernel's search.
func hold(ports fourtuple.PortRange, part int) error {
	limit := syscall.Rlimit{}
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	limit.Cur = limit.Max
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	remote := &syscall.SockaddrInet4{Port: int(destination.Port()), Addr: destination.Addr().As4()}
	held := 0
	for port := int(ports.Low); port <= int(ports.High); port++ {
		if port%20 == 1 || port%holders != part {
			continue
		}
		fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
		if err != nil {
			return os.NewSyscallError("socket", err)
		}
		const ipLocalPortRange = 51
		if err := syscall.SetsockoptInt(fd, syscall.SOL_IP, ipLocalPortRange, int(int32(uint32(port)|uint32(port)<<16))); err != nil {
			return os.NewSyscallError("setsockopt(IP_LOCAL_PORT_RANGE)", err)
		}
		if err := syscall.Connect(fd, remote); err != nil {
			return os.NewSyscallError("connect", err)
		}
		held++
	}
	fmt.Println(held)
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

// startHolders starts the processes that hold connections, and returns the number of connections.
func startHolders() (held int, stop func(), err error) {
	var ends []func()
	stop = func() {
		for _, end := range ends {
			end()
		}
	}
	var outputs []io.Reader
	for part := 0; part < holders; part++ {
		holder := again(fmt.Sprintf("holder %d", part))
		input, err := holder.StdinPipe()
		if err != nil {
			return 0, stop, err
		}
		output, err := holder.StdoutPipe()
		if err != nil {
			return 0, stop, err
		}
		if err := holder.Start(); err != nil {
			return 0, stop, err
		}
		ends = append(ends, func() {
			input.Close()
			holder.Wait()
		})
		outputs = append(outputs, output)
	}
	for _, output := range outputs {
		line, err := bufio.NewReader(output).ReadString('\n')
		if err != nil {
			return 0, stop, fmt.Errorf("a holder ended early: %w", err)
		}
		count, err := strconv.Atoi(strings.TrimSpace(line))
		if err != nil {
			return 0, stop, err
		}
		held += count
	}
	return held, stop, nil
}

// startServer starts nginx and waits until it answers on a port that no other process listens on.
func startServer() (stop func(), err error) {
	directory, err := os.MkdirTemp("", "fourtuple-rate-")
	if err != nil {
		return nil, err
	}
	configuration := filepath.Join(directory, "nginx.conf")
	text := fmt.Sprintf(`daemon off;
worker_processes 2;
pid %[1]s/pid;
error_log stderr crit;
events { worker_connections 4096; }
http {
	access_log off;
	keepalive_timeout 0;
	server {
		listen %[2]v reuseport backlog=4096;
		listen 127.0.0.1:4001;
		location / { return 200 "ok\n"; }
	}
}
`, directory, destination)
	if err := os.WriteFile(configuration, []byte(text), 0o600); err != nil {
		return nil, err
	}
	server := exec.Command("nginx", "-p", directory, "-c", configuration)
	server.Stderr = os.Stderr
	server.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if err := server.Start(); err != nil {
		return nil, err
	}
	stop = func() {
		server.Process.Signal(syscall.SIGTERM)
		server.Wait()
		os.RemoveAll(directory)
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		conn, err := net.Dial("tcp", "127.0.0.1:4001")
		if err == nil {
			conn.Close()
			return stop, nil
		}
		if time.Now().After(deadline) {
			stop()
			return nil, fmt.Errorf("nginx does not listen: %w", err)
		}
	}
}

// side is one of the two clients, with its results.
type side struct {
	name    string
	client  *http.Client
	program []string
	rates   []float64
	// micros is the CPU time of the client's process per connection, in microseconds.
	micros []float64
}

func compare(given settings, dialer *fourtuple.Dialer) error {
	client := func(dial func(context.Context, string, string) (net.Conn, error)) *http.Client {
		return &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
	}
	sides := []*side{
		{name: "net.Dialer", client: client((&net.Dialer{}).DialContext)},
		{name: "fourtuple.Dialer", client: client(dialer.DialContext)},
	}
	if len(given.programs[0]) > 0 {
		sides = []*side{{name: "without", program: given.programs[0]}, {name: "with", program: given.programs[1]}}
	}
	var ratios []float64
	for block := 0; block < given.blocks; block++ {
		var sums [2]float64
		for _, i := range []int{0, 1, 1, 0} {
			rate, err := sides[i].trial(given)
			if err != nil {
				return fmt.Errorf("%s: %w", sides[i].name, err)
			}
			sums[i] += rate
		}
		ratios = append(ratios, sums[1]/sums[0])
	}
	for _, s := range sides {
		fmt.Printf("%-18s %s connections/s, %s us of CPU in the client for each\n", s.name, interval(s.rates), interval(s.micros))
	}
	fmt.Printf("%-18s %s (per block A B B A)\n", "ratio", interval(ratios))
	load, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return err
	}
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return err
	}
	fmt.Printf("Linux %s, %d CPUs, load average %s, %s, %d workers\n", strings.TrimSpace(string(release)), runtime.NumCPU(),
		strings.TrimSpace(string(load)), runtime.Version(), given.workers)
	return nil
}

// trial sends requests, each on a new connection, and returns their rate.
func (s *side) trial(given settings) (float64, error) {
	if len(s.program) > 0 {
		return s.run()
	}
	counts := make([]int, given.workers)
	failures := make([]error, given.workers)
	var group sync.WaitGroup
	cpu, begun := cpuTime(), time.Now()
	for worker := range counts {
		group.Add(1)
		go func() {
			defer group.Done()
			for time.Since(begun) < given.trial && failures[worker] == nil {
				failures[worker] = s.request()
				counts[worker]++
			}
		}()
	}
	group.Wait()
	elapsed := time.Since(begun)
	cpu = cpuTime() - cpu
	requests := 0
	for _, count := range counts {
		requests += count
	}
	rate := float64(requests) / elapsed.Seconds()
	s.rates = append(s.rates, rate)
	s.micros = append(s.micros, float64(cpu.Microseconds())/float64(requests))
	return rate, errors.Join(failures...)
}

// run is a trial of a program. The rate includes its start.
func (s *side) run() (float64, error) {
	command := exec.Command(s.program[0], s.program[1:]...)
	command.Stderr = os.Stderr
	begun := time.Now()
	output, err := command.Output()
	elapsed := time.Since(begun)
	if err != nil {
		return 0, err
	}
	connections := float64(strings.Count(string(output), "\n"))
	if connections == 0 {
		return 0, errors.New("the program printed no line, and so made no connection")
	}
	rate := connections / elapsed.Seconds()
	cpu := command.ProcessState.UserTime() + command.ProcessState.SystemTime()
	s.rates = append(s.rates, rate)
	s.micros = append(s.micros, float64(cpu.Microseconds())/connections)
	return rate, nil
}

func (s *side) request() error {
	response, err := s.client.Get(fmt.Sprintf("http://%v/", destination))
	if err != nil {
		return err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if string(body) != "ok\n" {
		return fmt.Errorf("another response: %q", body)
	}
	return nil
}

// cpuTime returns the CPU time of this process, in user mode and in the kernel.
func cpuTime() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// interval returns the median and its 95% interval from 2,000 resamples.
func interval(samples []float64) string {
	random := fourtuple.NewRandom(1)
	medians := make([]float64, 2000)
	drawn := make([]float64, len(samples))
	for i := range medians {
		for j := range drawn {
			drawn[j] = samples[random.Below(uint32(len(samples)))]
		}
		medians[i] = median(drawn)
	}
	slices.Sort(medians)
	return fmt.Sprintf("%9.1f (95%% interval %.1f to %.1f)", median(samples), medians[len(medians)/40], medians[len(medians)-1-len(medians)/40])
}

func median(samples []float64) float64 {
	sorted := slices.Clone(samples)
	slices.Sort(sorted)
	half := len(sorted) / 2
	if len(sorted)%2 == 0 {
		return (sorted[half-1] + sorted[half]) / 2
	}
	return sorted[half]
}
