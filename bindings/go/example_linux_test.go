package fourtuple_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"sync/atomic"
	"time"

	"fourtuple.example/fourtuple"
)

// A client of net/http whose connections find their source ports quickly.
func Example() {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello") }))
	defer server.Close()

	dialer, err := fourtuple.New(fourtuple.Config{Net: net.Dialer{Timeout: 3 * time.Second}})
	if err != nil {
		fmt.Println(err)
		return
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.DialContext = dialer.DialContext
	client := http.Client{Transport: transport}
	defer client.CloseIdleConnections()

	response, err := client.Get(server.URL)
	if err != nil {
		// The error of net/http keeps the cause.
		fmt.Println(fourtuple.Exhausted(err), fourtuple.Retryable(err), err)
		return
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	fmt.Println(string(body), err)
	// Output: hello <nil>
}

// Each source address has its own ports towards a destination.
func ExampleParseSources() {
	sources, err := fourtuple.ParseSources("127.0.0.0/30, 127.0.0.9")
	if err != nil {
		fmt.Println(err)
		return
	}
	dialer, err := fourtuple.New(fourtuple.Config{Sources: sources})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(len(sources), dialer.Choice().Found != fourtuple.NotProbed)
	// Output: 3 true
}

// The dial function of gRPC or of a database driver: grpc.WithContextDialer(dialer.ContextDialer("tcp")),
// mysql.RegisterDialContext("tcp", dialer.ContextDialer("tcp")), or the field DialFunc of pgconn.Config: dialer.DialContext.
func ExampleDialer_ContextDialer() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer listener.Close()
	dialer, err := fourtuple.New(fourtuple.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	dial := dialer.ContextDialer("tcp")
	conn, err := dial(context.Background(), listener.Addr().String())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer conn.Close()
	fmt.Println(conn.RemoteAddr().String() == listener.Addr().String())
	// Output: true
}

// A program that needs a net.Dialer of its own.
func ExampleDialer_ControlContext() {
	server := httptest.NewServer(http.NotFoundHandler())
	defer server.Close()
	dialer, err := fourtuple.New(fourtuple.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	own := net.Dialer{ControlContext: dialer.ControlContext}
	conn, err := own.Dial("tcp", server.Listener.Addr().String())
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(conn.Close())
	// Output: <nil>
}

// A hook that counts dials by outcome, as metrics and logs do.
func ExampleConfig_onDial() {
	server := httptest.NewServer(http.NotFoundHandler())
	address := server.Listener.Addr().String()
	var connected, exhausted, failed atomic.Int64
	dialer, err := fourtuple.New(fourtuple.Config{OnDial: func(_ context.Context, done fourtuple.DialDone) {
		switch {
		case done.Err == nil:
			connected.Add(1)
		case fourtuple.Exhausted(done.Err):
			exhausted.Add(1)
		default:
			failed.Add(1)
			log.Printf("dial %v: strategy=%v tries=%d connect=%v total=%v: %v",
				done.Destination, done.Strategy, done.Tries, done.Connect, done.Duration, done.Err)
		}
	}})
	if err != nil {
		fmt.Println(err)
		return
	}
	if conn, err := dialer.Dial("tcp", address); err == nil {
		conn.Close()
	}
	server.Close()
	_, err = dialer.Dial("tcp", address)
	fmt.Println(connected.Load(), exhausted.Load(), failed.Load(), errors.Is(err, fourtuple.Refused))
	// Output: 1 0 1 true
}

// The source port of a connection, and the tries that it took.
func ExampleDialer_DialTCP() {
	server := httptest.NewServer(http.NotFoundHandler())
	defer server.Close()
	dialer, err := fourtuple.New(fourtuple.Config{Strategy: fourtuple.FullRange{}})
	if err != nil {
		fmt.Println(err)
		return
	}
	conn, report, err := dialer.DialTCP(context.Background(), netip.MustParseAddrPort(server.Listener.Addr().String()))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer conn.Close()
	fmt.Println(report.Strategy, report.Tries, dialer.Choice().Ports.Contains(report.Source.Port()))
	// Output: full-range 1 true
}

// The cause of a failed dial. EADDRNOTAVAIL of bind() and of connect() have different causes.
func ExampleDialError() {
	dialer, err := fourtuple.New(fourtuple.Config{Sources: []netip.Addr{netip.MustParseAddr("192.0.2.1")}})
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = dialer.Dial("tcp", "127.0.0.1:80")
	var failure *fourtuple.DialError
	if errors.As(err, &failure) {
		fmt.Println(failure.Kind, "/", failure.Call, "/", failure.Retryable())
	}
	fmt.Println(errors.Is(err, fourtuple.SourceNotLocal), errors.Is(err, fourtuple.PortsExhausted))
	// Output:
	// the source is not an address of this host / bind / false
	// true false
}

// Several listeners on one port, one for each worker.
func ExampleListenConfig_ListenGroup() {
	group, err := fourtuple.ListenConfig{}.ListenGroup(context.Background(), "tcp", "127.0.0.1:0", 2)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(len(group), group[0].Addr().String() == group[1].Addr().String())
	for _, listener := range group {
		listener.Close()
	}
	// Output: 2 true
}
