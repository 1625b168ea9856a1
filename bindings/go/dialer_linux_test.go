package fourtuple

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

var background = context.Background()

// strategies are all strategies, with tries that find the last of 8 ports.
func strategies() []Strategy {
	return []Strategy{
		Auto{}, KernelDefault{}, FullRange{}, RandomWindow{Width: 3, Tries: 2, ThenFullRange: true}, SelectTestRepeat{Tries: 200},
	}
}

// fill dials until n connections are open, and closes them at the end of the test.
func fill(t *testing.T, dialer *Dialer, destination netip.AddrPort, n int) []*net.TCPConn {
	t.Helper()
	var all []*net.TCPConn
	for i := 0; i < n; i++ {
		conn, report, err := dialer.DialTCP(background, destination)
		if err != nil {
			t.Fatalf("dial %d with %v: %v", i+1, dialer.Choice(), err)
		}
		if local := conn.LocalAddr().(*net.TCPAddr).AddrPort(); local != report.Source || report.Tries == 0 {
			t.Fatalf("the report %+v is not about %v", report, local)
		}
		t.Cleanup(func() { conn.Close() })
		all = append(all, conn)
	}
	return all
}

// reset closes connections without TIME_WAIT sockets, which would hold ports.
func reset(conns ...*net.TCPConn) {
	for _, conn := range conns {
		conn.SetLinger(0)
		conn.Close()
	}
}

// failure returns the DialError of a dial that has to fail.
func failure(t *testing.T, dialer *Dialer, destination netip.AddrPort) (*DialError, error) {
	t.Helper()
	conn, err := dialer.DialContext(background, "tcp", destination.String())
	if err == nil {
		t.Fatalf("a connection from %v with %v", conn.LocalAddr(), dialer.Choice())
	}
	var op *net.OpError
	var dial *DialError
	if !errors.As(err, &op) || !errors.As(err, &dial) {
		t.Fatalf("%T %v is no DialError in an OpError", err, err)
	}
	return dial, err
}

func TestEveryStrategyFillsAllPorts(t *testing.T) {
	inNamespace(t, func() {
		needsOption(t)
		setSysctl(t, "net.ipv4.ip_local_port_range", "20000 20007")
		for _, address := range []string{"127.0.0.1", "::1"} {
			destination := listen(t, address, 1024)
			for _, strategy := range strategies() {
				dialer := must(New(Config{Strategy: strategy}))(t)
				conns := fill(t, dialer, destination, 8)
				before := openDescriptors(t)
				for i := 0; i < 5; i++ {
					dial, err := failure(t, dialer, destination)
					if dial.Kind != PortsExhausted || !Exhausted(err) || !Retryable(err) || dial.Timeout() {
						t.Fatalf("%v: %v", strategy, err)
					}
					if !errors.Is(err, syscall.EADDRNOTAVAIL) && !errors.Is(err, syscall.EADDRINUSE) {
						t.Fatalf("%v has no errno", err)
					}
					if dial.Census == nil || dial.Census.Established != 8 || dial.Census.Ports != 8 {
						t.Fatalf("%v: %v, %+v", strategy, err, dial.Census)
					}
				}
				if after := openDescriptors(t); after != before {
					t.Fatalf("%v: %d descriptors before, %d after failures", strategy, before, after)
				}
				reset(conns...)
			}
		}
	})
}

func TestExhaustionIsToldInWords(t *testing.T) {
	inNamespace(t, func() {
		setSysctl(t, "net.ipv4.ip_local_port_range", "20000 20003")
		setSysctl(t, "net.ipv4.ip_local_reserved_ports", "20002")
		destination := listen(t, "127.0.0.1", 1024)
		source := netip.MustParseAddr("127.0.0.2")
		dialer := must(New(Config{Strategy: KernelDefault{}, Sources: []netip.Addr{source}}))(t)
		fill(t, dialer, destination, 3)
		dial, err := failure(t, dialer, destination)
		const want = "no source port is left from 127.0.0.2: of 3 ports 3 are established, 0 in TIME_WAIT, 0 in other states (connect: cannot assign requested address)"
		if dial.Source != source || !strings.HasSuffix(err.Error(), want) {
			t.Fatalf("%v", err)
		}
		silent := must(New(Config{Strategy: KernelDefault{}, WithoutCensus: true}))(t)
		fill(t, silent, destination, 3)
		if dial, _ := failure(t, silent, destination); dial.Census != nil || dial.CensusErr != nil {
			t.Fatalf("%+v", dial)
		}
	})
}

func TestReservedListsOfAnyLengthAreRead(t *testing.T) {
	inNamespace(t, func() {
		for _, odd := range []int{6, 200, 32767} {
			list := make([]string, 0, odd)
			for port := 65535 - 2*odd; port < 65535; port += 2 {
				list = append(list, strconv.Itoa(port))
			}
			setSysctl(t, "net.ipv4.ip_local_reserved_ports", strings.Join(list, ","))
			if reserved, err := reservedIn(AllPorts()); err != nil || reserved != uint32(odd) {
				t.Fatalf("%d of %d reserved ports: %v", reserved, odd, err)
			}
		}
	})
}

func TestReservedPortsAreNotDrawn(t *testing.T) {
	inNamespace(t, func() {
		setSysctl(t, "net.ipv4.ip_local_port_range", "20000 20015")
		setSysctl(t, "net.ipv4.ip_local_reserved_ports", "20000-20007")
		destination := listen(t, "127.0.0.1", 1024)
		// Draws of reserved ports do not count: 400 tries miss the last of 8 ports once in 1e23.
		dialer := must(New(Config{Strategy: SelectTestRepeat{Tries: 400}}))(t)
		conns := fill(t, dialer, destination, 8)
		for _, conn := range conns {
			if port := conn.LocalAddr().(*net.TCPAddr).Port; port < 20008 {
				t.Fatalf("port %d is reserved", port)
			}
		}
		if dial, err := failure(t, dialer, destination); dial.Kind != PortsExhausted {
			t.Fatal(err)
		}
		setSysctl(t, "net.ipv4.ip_local_reserved_ports", "20000-20015")
		none := must(New(Config{Strategy: SelectTestRepeat{Tries: 400}}))(t)
		if dial, err := failure(t, none, destination); dial.Kind != PortsExhausted {
			t.Fatal(err)
		}
		setSysctl(t, "net.ipv4.ip_local_reserved_ports", "")
	})
}

// The dialer of other systems, with the errors of this kernel.
func TestPackageNetReportsExhaustion(t *testing.T) {
	inNamespace(t, func() {
		setSysctl(t, "net.ipv4.ip_local_port_range", "20000 20003")
		destination := listen(t, "127.0.0.1", 1024)
		fill(t, must(New(Config{}))(t), destination, 4)
		_, report, err := plain(t, Config{}).openPlain(background, "tcp", destination)
		if !Exhausted(err) || !Retryable(err) || !errors.Is(err, syscall.EADDRNOTAVAIL) || report.Source.IsValid() {
			t.Fatalf("%+v %v", report, err)
		}
		_, _, err = plain(t, Config{}).openPlain(background, "tcp", listen(t, "127.0.0.2", 16))
		if err != nil {
			t.Fatal(err)
		}
	})
}

func TestUnixTargetsAreDialed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "socket")
	for address, target := range map[string]string{path: "unix://" + path, "@fourtuple": "\x00fourtuple"} {
		listener := must(net.Listen("unix", address))(t)
		conn := must(must(New(Config{}))(t).ContextDialer("tcp")(background, target))(t)
		if conn.RemoteAddr().Network() != "unix" {
			t.Errorf("%v", conn.RemoteAddr())
		}
		conn.Close()
		listener.Close()
	}
}

func TestTimeWaitHoldsPorts(t *testing.T) {
	inNamespace(t, func() {
		setSysctl(t, "net.ipv4.ip_local_port_range", "20000 20007")
		setSysctl(t, "net.ipv4.tcp_tw_reuse", "0")
		listener := must(net.Listen("tcp", "127.0.0.1:4000"))(t)
		destination := listener.Addr().(*net.TCPAddr).AddrPort()
		dialer := must(New(Config{}))(t)
		for i := 0; i < 8; i++ {
			conn := must(dialer.Dial("tcp", destination.String()))(t)
			served := must(listener.Accept())(t)
			// The client closes first, and waits until the server has closed too.
			if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
				t.Fatal(err)
			}
			io.Copy(io.Discard, served)
			served.Close()
			io.Copy(io.Discard, conn)
			conn.Close()
		}
		dial, err := failure(t, dialer, destination)
		if !Exhausted(err) || dial.Census == nil || dial.Census.TimeWait != 8 || dial.Census.Established != 0 {
			t.Fatalf("%v", err)
		}
	})
}

func TestFacesOfEaddrnotavailAreToldApart(t *testing.T) {
	inNamespace(t, func() {
		destination := listen(t, "127.0.0.1", 1024)
		foreign := must(New(Config{Sources: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}))(t)
		dial, err := failure(t, foreign, destination)
		if dial.Kind != SourceNotLocal || dial.Call != "bind" || !errors.Is(err, syscall.EADDRNOTAVAIL) || Exhausted(err) || Retryable(err) {
			t.Fatalf("%v", err)
		}
		fixed := must(New(Config{SourcePort: 20000}))(t)
		fill(t, fixed, destination, 1)
		dial, err = failure(t, fixed, destination)
		if dial.Kind != TupleBusy || dial.SourcePort != 20000 || !errors.Is(err, syscall.EADDRNOTAVAIL) || Exhausted(err) || !Retryable(err) {
			t.Fatalf("%v", err)
		}
		setSysctl(t, "net.ipv4.ip_local_port_range", "20000 20000")
		dial, err = failure(t, must(New(Config{Strategy: FullRange{}}))(t), destination)
		if dial.Kind != PortsExhausted || dial.Call != "connect" || !errors.Is(err, syscall.EADDRNOTAVAIL) {
			t.Fatalf("%v", err)
		}
		mixed := must(New(Config{Sources: []netip.Addr{netip.MustParseAddr("::1")}}))(t)
		if dial, _ := failure(t, mixed, destination); dial.Kind != WrongFamily {
			t.Fatalf("%v", dial)
		}
	})
}

// A library such as gRPC makes text of the error of a dial; the sink has the error itself.
func TestErrorSinkKeepsTheLastError(t *testing.T) {
	inNamespace(t, func() {
		dialer := must(New(Config{}))(t)
		var sink ErrorSink
		dial := sink.Dialer(dialer.ContextDialer("tcp"))
		if sink.Last() != nil {
			t.Fatalf("%v", sink.Last())
		}
		_, err := dial(context.Background(), "127.0.0.1:4999")
		flattened := errors.New(err.Error())
		if errors.Is(flattened, Refused) || !errors.Is(sink.Last(), Refused) || !Retryable(sink.Last()) {
			t.Fatalf("%v", sink.Last())
		}
		conn, err := dial(context.Background(), listen(t, "127.0.0.1", 0).String())
		if err != nil || sink.Last() != nil {
			t.Fatalf("%v, %v", err, sink.Last())
		}
		conn.Close()
	})
}

func TestRefusedConnectionIsNotRetried(t *testing.T) {
	inNamespace(t, func() {
		for _, strategy := range strategies() {
			dialer := must(New(Config{Strategy: strategy}))(t)
			dial, err := failure(t, dialer, netip.MustParseAddrPort("127.0.0.1:4999"))
			if dial.Kind != Refused || !errors.Is(err, syscall.ECONNREFUSED) || !Retryable(err) || Exhausted(err) {
				t.Fatalf("%v: %v", strategy, err)
			}
			// Alerts search for the words of the kernel.
			if !strings.Contains(err.Error(), "connection refused") {
				t.Fatalf("%v: %v", strategy, err)
			}
		}
	})
}

// silent returns an address that does not answer: the accept queue of its listener is full.
func silent(t *testing.T) netip.AddrPort {
	t.Helper()
	destination := listen(t, "127.0.0.1", 0)
	fill(t, must(New(Config{}))(t), destination, 1)
	// The dial may end before the listener has received the ACK.
	full := fmt.Sprintf(":%04X 00000000:0000 0A 00000000:00000001 ", destination.Port())
	for !strings.Contains(string(must(os.ReadFile("/proc/thread-self/net/tcp"))(t)), full) {
		time.Sleep(time.Millisecond)
	}
	return destination
}

func TestTimeoutsAreTypedErrors(t *testing.T) {
	inNamespace(t, func() {
		destination := silent(t)
		dialer := must(New(Config{Net: net.Dialer{Timeout: 30 * time.Millisecond}}))(t)
		dial, err := failure(t, dialer, destination)
		var timeout net.Error
		if dial.Kind != TimedOut || !errors.As(err, &timeout) || !timeout.Timeout() || !Retryable(err) || dial.After <= 0 {
			t.Fatalf("%v", err)
		}
		ctx, cancel := context.WithTimeout(background, 30*time.Millisecond)
		defer cancel()
		_, _, err = must(New(Config{}))(t).DialTCP(ctx, destination)
		if !errors.Is(err, TimedOut) || !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("%v", err)
		}
	})
}

func TestCancellationEndsTheDial(t *testing.T) {
	inNamespace(t, func() {
		destination := silent(t)
		dialer := must(New(Config{}))(t)
		ctx, cancel := context.WithCancel(background)
		ended := make(chan error)
		go func() {
			_, err := dialer.DialContext(ctx, "tcp", destination.String())
			ended <- err
		}()
		// Wait for the socket in SYN_SENT.
		for {
			if census := must(takeCensus(netip.Addr{}, destination, dialer.ports))(t); census.Other > 0 {
				break
			}
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) || errors.Is(err, TimedOut) || Retryable(err) {
			t.Fatalf("%v", err)
		}
		if _, err := dialer.DialContext(ctx, "tcp", destination.String()); !errors.Is(err, context.Canceled) {
			t.Fatalf("%v", err)
		}
	})
}

func TestSelfConnectIsAnError(t *testing.T) {
	inNamespace(t, func() {
		setSysctl(t, "net.ipv4.ip_local_port_range", "20000 20000")
		for _, destination := range []string{"127.0.0.1:20000", "[::1]:20000"} {
			dialer := must(New(Config{Strategy: KernelDefault{}}))(t)
			dial, err := failure(t, dialer, netip.MustParseAddrPort(destination))
			if dial.Kind != SelfConnect || !Retryable(err) {
				t.Fatalf("%v", err)
			}
		}
	})
}

func TestConcurrentDialsGetAllPorts(t *testing.T) {
	inNamespace(t, func() {
		setSysctl(t, "net.ipv4.ip_local_port_range", "20000 20399")
		destination := listen(t, "127.0.0.1", 1024)
		pool := must(ParseSources("127.0.0.2,127.0.0.3"))(t)
		dialer := must(New(Config{Sources: pool, WithoutCensus: true}))(t)
		var lock sync.Mutex
		var group sync.WaitGroup
		seen := make(map[netip.AddrPort]bool)
		for worker := 0; worker < 16; worker++ {
			group.Add(1)
			go func() {
				defer group.Done()
				// One dial in five finds no port.
				for i := 0; i < 62; i++ {
					conn, report, err := dialer.DialTCP(background, destination)
					if Exhausted(err) {
						continue
					}
					if err != nil {
						t.Error(err)
						return
					}
					lock.Lock()
					if source := report.Source.Addr(); seen[report.Source] || source != pool[0] && source != pool[1] {
						t.Errorf("%v twice, or no source of the pool", report.Source)
					}
					seen[report.Source] = true
					lock.Unlock()
					defer conn.Close()
				}
			}()
		}
		group.Wait()
		if len(seen) != 800 {
			t.Fatalf("%d sources, expected 2 x 400", len(seen))
		}
	})
}

func TestSourcesAreUsedInTurn(t *testing.T) {
	inNamespace(t, func() {
		setSysctl(t, "net.ipv4.ip_local_port_range", "20000 20007")
		destination := listen(t, "127.0.0.1", 1024)
		for _, strategy := range strategies() {
			// One address is not of this host.
			pool := must(ParseSources("127.0.0.2,192.0.2.1,127.0.0.3,::1"))(t)
			dialer := must(New(Config{Strategy: strategy, Sources: pool}))(t)
			conns := fill(t, dialer, destination, 16)
			dial, err := failure(t, dialer, destination)
			if dial.Kind != PortsExhausted || dial.Source == pool[1] {
				t.Fatalf("%v: %v", strategy, err)
			}
			// A port that becomes free is found while all sources are backed off: dials use them in turn.
			reset(conns[3])
			dials := 0
			for err != nil {
				var conn net.Conn
				if dials++; dials > len(pool) {
					t.Fatalf("%v: %v", strategy, err)
				}
				if conn, err = dialer.Dial("tcp", destination.String()); err == nil {
					reset(conn.(*net.TCPConn))
				}
			}
			reset(conns...)
		}
	})
}

func TestPortsKeepToTheRange(t *testing.T) {
	inNamespace(t, func() {
		needsOption(t)
		setSysctl(t, "net.ipv4.ip_local_port_range", "20000 20099")
		destination := listen(t, "127.0.0.1", 1024)
		for _, strategy := range []Strategy{nil, FullRange{}, DefaultRandomWindow(), SelectTestRepeat{Tries: 200}} {
			dialer := must(New(Config{Strategy: strategy, Ports: PortRange{20050, 20053}}))(t)
			conns := fill(t, dialer, destination, 4)
			for _, conn := range conns {
				if port := conn.LocalAddr().(*net.TCPAddr).Port; port < 20050 || port > 20053 {
					t.Fatalf("%v: port %d", strategy, port)
				}
			}
			if dial, _ := failure(t, dialer, destination); dial.Kind != PortsExhausted || dial.Census.Ports != 4 {
				t.Fatalf("%v", dial)
			}
			reset(conns...)
		}
	})
}

func TestInvalidSettingsAreRefused(t *testing.T) {
	inNamespace(t, func() {
		source := netip.MustParseAddr("127.0.0.2")
		for field, config := range map[string]Config{
			"Net.LocalAddr": {Net: net.Dialer{LocalAddr: &net.TCPAddr{}}},
			"Device":        {Device: "a-name-that-is-too-long"},
			"Sources":       {Sources: []netip.Addr{source, source}},
			"SourcePort":    {SourcePort: 1, Sources: []netip.Addr{source, netip.MustParseAddr("127.0.0.3")}},
			"Ports":         {Ports: PortRange{1000, 2000}},
			"Strategy":      {Strategy: RandomWindow{}},
		} {
			var invalid *ConfigError
			if _, err := New(config); !errors.As(err, &invalid) || invalid.Field != field {
				t.Errorf("%s: %v", field, err)
			}
		}
		var invalid *ConfigError
		if _, err := New(Config{Strategy: KernelDefault{}, Ports: PortRange{40000, 40001}}); !errors.As(err, &invalid) {
			t.Errorf("a range with KernelDefault: %v", err)
		}
		dialer := must(New(Config{}))(t)
		var unknown net.UnknownNetworkError
		if _, err := dialer.Dial("udp", "127.0.0.1:4000"); !errors.As(err, &unknown) {
			t.Errorf("udp: %v", err)
		}
	})
}

func TestWithoutTheOptionAutoBindsPastHalf(t *testing.T) {
	inNamespace(t, func() {
		hideOption51(t)
		setSysctl(t, "net.ipv4.ip_local_port_range", "20000 20007")
		destination := listen(t, "127.0.0.1", 1024)
		dialer := must(New(Config{}))(t)
		if dialer.Choice().Found != Absent {
			t.Fatalf("%+v", dialer.Choice())
		}
		conns := fill(t, dialer, destination, 4)
		for _, conn := range conns {
			if port := conn.LocalAddr().(*net.TCPAddr).Port; port%2 != 0 {
				t.Fatalf("port %d of the kernel's second half", port)
			}
		}
		// The dialer counts the sockets at most once per second: another dialer takes its own census.
		dialer = must(New(Config{}))(t)
		conn, report, err := dialer.DialTCP(background, destination)
		if err != nil || report.Strategy != DefaultSelectTestRepeat() {
			t.Fatalf("%+v %v", report, err)
		}
		conn.Close()
		for _, strategy := range []Strategy{FullRange{}, DefaultRandomWindow()} {
			dial, err := failure(t, must(New(Config{Strategy: strategy}))(t), destination)
			if dial.Kind != NotSupported || !errors.Is(err, syscall.ENOPROTOOPT) || Retryable(err) {
				t.Fatalf("%v", err)
			}
		}
	})
}

func TestPortsAreThoseOfTheSteps(t *testing.T) {
	inNamespace(t, func() {
		needsOption(t)
		destination := listen(t, "127.0.0.1", 4096)
		for seed := uint64(1); seed <= 100; seed++ {
			for _, strategy := range []Strategy{DefaultRandomWindow(), DefaultSelectTestRepeat()} {
				dialer := must(New(Config{Strategy: strategy}))(t)
				dialer.random = NewRandom(seed)
				step, _ := strategy.Next(0, dialer.ports, NewRandom(seed))
				conn, report, err := dialer.DialTCP(background, destination)
				if err != nil {
					t.Fatal(err)
				}
				reset(conn)
				port := report.Source.Port()
				if report.Tries != 1 || step.Kind == Bind && port != step.Port || step.Kind == Window && !step.Window.Contains(port) {
					t.Fatalf("%v, seed %d: %+v, expected %+v", strategy, seed, report, step)
				}
			}
		}
	})
}

func TestEachAddressOfANameIsTried(t *testing.T) {
	inNamespace(t, func() {
		open := listen(t, "127.0.0.1", 1024)
		closed := []netip.AddrPort{netip.MustParseAddrPort("[::1]:4999"), netip.MustParseAddrPort("127.0.0.2:4999")}
		dialer := must(New(Config{}))(t)
		conn, _, err := dialer.race(background, "tcp", "name", append(closed, open))
		if err != nil || conn.RemoteAddr().String() != open.String() {
			t.Fatalf("%v %v", conn, err)
		}
		conn.Close()
		_, _, err = dialer.race(background, "tcp", "name", closed)
		var host *HostError
		if !errors.As(err, &host) || len(host.Errors) != 2 || !errors.Is(err, Refused) || !Retryable(err) || host.Timeout() {
			t.Fatalf("%v", err)
		}
		// The first address does not answer; the second one is tried meanwhile.
		dialer = must(New(Config{Net: net.Dialer{FallbackDelay: time.Millisecond}}))(t)
		conn, _, err = dialer.race(background, "tcp", "name", []netip.AddrPort{silent(t), open})
		if err != nil || conn.RemoteAddr().String() != open.String() {
			t.Fatalf("%v %v", conn, err)
		}
		conn.Close()
	})
}

// Without a second dial that starts meanwhile, a silent address uses up its share of the time.
func TestASilentAddressHasAShareOfTheTime(t *testing.T) {
	inNamespace(t, func() {
		dialer := must(New(Config{Net: net.Dialer{FallbackDelay: -1}}))(t)
		ctx, cancel := context.WithTimeout(background, time.Minute)
		defer cancel()
		divided, stop := share(ctx, 30)
		defer stop()
		deadline, _ := divided.Deadline()
		if left := time.Until(deadline); left > 2*time.Second {
			t.Errorf("%v for one of 30 addresses in a minute", left)
		}
		ctx, cancel = context.WithTimeout(background, 4*time.Second)
		defer cancel()
		conn, _, err := dialer.race(ctx, "tcp", "name", []netip.AddrPort{silent(t), listen(t, "127.0.0.1", 1024)})
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
	})
}

func TestFamiliesOfANameAlternate(t *testing.T) {
	address := netip.MustParseAddrPort
	first := []netip.AddrPort{address("[::1]:1"), address("[::1]:2"), address("[::1]:3")}
	second := []netip.AddrPort{address("127.0.0.1:1")}
	want := []netip.AddrPort{first[0], second[0], first[1], first[2]}
	if got := alternate(first, second); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Fatalf("%v", got)
	}
}

func TestTransportAndControlConnect(t *testing.T) {
	inNamespace(t, func() {
		listener := must(net.Listen("tcp", "127.0.0.1:4000"))(t)
		server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, r.RemoteAddr) })}
		go server.Serve(listener)
		defer server.Close()
		source := netip.MustParseAddr("127.0.0.9")
		for _, strategy := range strategies() {
			dialer := must(New(Config{Strategy: strategy, Sources: []netip.Addr{source}}))(t)
			own := net.Dialer{ControlContext: dialer.ControlContext}
			older := net.Dialer{Control: dialer.Control}
			for _, dial := range []func(context.Context, string, string) (net.Conn, error){dialer.DialContext, own.DialContext, older.DialContext} {
				client := http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
				response := must(client.Get("http://127.0.0.1:4000/"))(t)
				body := must(io.ReadAll(response.Body))(t)
				response.Body.Close()
				if !strings.HasPrefix(string(body), "127.0.0.9:") {
					t.Fatalf("%v: from %s", strategy, body)
				}
			}
		}
	})
}

func TestControlReportsExhaustion(t *testing.T) {
	inNamespace(t, func() {
		setSysctl(t, "net.ipv4.ip_local_port_range", "20000 20003")
		destination := listen(t, "127.0.0.1", 1024)
		for _, strategy := range strategies()[:4] {
			dialer := must(New(Config{Strategy: strategy}))(t)
			own := net.Dialer{Control: dialer.Control}
			conns := fill(t, dialer, destination, 4)
			if _, err := own.Dial("tcp", destination.String()); !errors.Is(err, PortsExhausted) || !errors.Is(err, syscall.EADDRNOTAVAIL) {
				t.Fatalf("%v: %v", strategy, err)
			}
			reset(conns...)
		}
	})
}

func TestControlOfTheUserRunsFirst(t *testing.T) {
	inNamespace(t, func() {
		destination := listen(t, "127.0.0.1", 1024)
		refusal := errors.New("refused by the user")
		calls := 0
		config := Config{Net: net.Dialer{Control: func(network, address string, _ syscall.RawConn) error {
			calls++
			if network != "tcp4" || address != destination.String() {
				t.Errorf("%s %s", network, address)
			}
			if calls > 1 {
				return refusal
			}
			return nil
		}}}
		dialer := must(New(config))(t)
		must(dialer.Dial("tcp", destination.String()))(t).Close()
		if _, err := dialer.Dial("tcp", destination.String()); !errors.Is(err, refusal) {
			t.Fatalf("%v", err)
		}
	})
}

func TestGroupListensOnOnePort(t *testing.T) {
	inNamespace(t, func() {
		group := must(ListenConfig{}.ListenGroup(background, "tcp", "127.0.0.1:0", 3))(t)
		for _, listener := range group {
			defer listener.Close()
			if listener.Addr().String() != group[0].Addr().String() {
				t.Fatalf("%v", listener.Addr())
			}
		}
		if _, err := (ListenConfig{}).Listen(background, "tcp", group[0].Addr().String()); !errors.Is(err, syscall.EADDRINUSE) {
			t.Fatalf("%v", err)
		}
		if _, err := (ListenConfig{ReusePort: true, Device: "absent"}).Listen(background, "tcp", "127.0.0.1:0"); !errors.Is(err, syscall.ENODEV) {
			t.Fatalf("%v", err)
		}
	})
}
