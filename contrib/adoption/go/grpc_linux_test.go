package adoption

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"fourtuple.example/fourtuple"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	health_v1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

// TestMain runs the tests in a network namespace: in a child, which has it from its start and so in all its threads.
func TestMain(m *testing.M) {
	const inside = "ADOPTION_IN_NAMESPACE"
	if os.Getenv(inside) != "" {
		os.Exit(m.Run())
	}
	child := exec.Command("/proc/self/exe", os.Args[1:]...)
	child.Env = append(os.Environ(), inside+"=1")
	child.Stdout, child.Stderr = os.Stdout, os.Stderr
	child.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() != 0 {
		child.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		child.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		child.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	var failed *exec.ExitError
	if err := child.Run(); errors.As(err, &failed) {
		os.Exit(failed.ExitCode())
	} else if err != nil {
		panic(err)
	}
	os.Exit(0)
}

// serve starts a gRPC server with the service of health checks on a port outside of the range of the client, which has 8 ports.
func serve(t *testing.T) string {
	t.Helper()
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		t.Fatalf("ip link: %v: %s", err, out)
	}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte("20000 20007"), 0o644); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp4", "127.0.0.1:4000")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	health_v1.RegisterHealthServer(server, health.NewServer())
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	return listener.Addr().String()
}

func check(client *grpc.ClientConn) error {
	// A call of gRPC fails at once if the channel cannot connect; the limit is for a defect only.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_, err := health_v1.NewHealthClient(client).Check(ctx, &health_v1.HealthCheckRequest{})
	return err
}

// withCause is the interceptor of docs/go.md: a call that failed for lack of a connection gets the error of the last dial beside its status.
func withCause(failures *fourtuple.ErrorSink) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, request, reply any, client *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
		err := invoke(ctx, method, request, reply, client, options...)
		if status.Code(err) == codes.Unavailable {
			err = errors.Join(err, failures.Last())
		}
		return err
	}
}

// The claim of docs/go.md: gRPC makes text of the error of a dial, and ErrorSink has the error itself.
func TestGRPCErrorsWithoutAFreePort(t *testing.T) {
	address := serve(t)
	dialer, err := fourtuple.New(fourtuple.Config{})
	if err != nil {
		t.Fatal(err)
	}
	var held []net.Conn
	for {
		conn, err := dialer.DialContext(context.Background(), "tcp", address)
		if fourtuple.Exhausted(err) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, conn)
	}
	var failures fourtuple.ErrorSink
	client, err := grpc.NewClient("passthrough:///"+address,
		grpc.WithContextDialer(failures.Dialer(dialer.ContextDialer("tcp"))),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()

	err = check(client)
	if status.Code(err) != codes.Unavailable {
		t.Fatalf("%v", err)
	}
	if errors.Is(err, fourtuple.PortsExhausted) || fourtuple.Exhausted(err) {
		t.Fatalf("this gRPC keeps the error of a dial; docs/go.md says that it makes text of it: %v", err)
	}
	if !strings.Contains(err.Error(), "cannot assign requested address") {
		t.Fatalf("the words of the kernel are missing: %v", err)
	}
	last := failures.Last()
	if !errors.Is(last, fourtuple.PortsExhausted) || !fourtuple.Exhausted(last) || !fourtuple.Retryable(last) || !errors.Is(last, syscall.EADDRNOTAVAIL) {
		t.Fatalf("%v", last)
	}

	// With the interceptor the error of the call has both, the status and the cause.
	seeing, err := grpc.NewClient("passthrough:///"+address,
		grpc.WithContextDialer(failures.Dialer(dialer.ContextDialer("tcp"))), grpc.WithUnaryInterceptor(withCause(&failures)),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer seeing.Close()
	err = check(seeing)
	var cause *fourtuple.DialError
	if status.Code(err) != codes.Unavailable || !fourtuple.Exhausted(err) || !errors.As(err, &cause) || cause.Census.Established != 8 {
		t.Fatalf("%v, %+v", err, cause)
	}

	// A closed socket of the client holds its port in TIME_WAIT, and one that is reset does not.
	for _, conn := range held {
		conn.(*net.TCPConn).SetLinger(0)
		conn.Close()
	}
	client.ResetConnectBackoff()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if _, err := health_v1.NewHealthClient(client).Check(ctx, &health_v1.HealthCheckRequest{}, grpc.WaitForReady(true)); err != nil {
		t.Fatal(err)
	}
	if failures.Last() != nil {
		t.Fatalf("after a connection: %v", failures.Last())
	}
}

// A client that has the dialer for all its targets reaches Unix sockets too.
func TestGRPCReachesUnixTargets(t *testing.T) {
	directory := t.TempDir()
	t.Chdir(directory)
	server := grpc.NewServer()
	health_v1.RegisterHealthServer(server, health.NewServer())
	t.Cleanup(server.Stop)
	for _, address := range []string{directory + "/socket", "@fourtuple"} {
		listener, err := net.Listen("unix", address)
		if err != nil {
			t.Fatal(err)
		}
		go server.Serve(listener)
	}
	dialer, err := fourtuple.New(fourtuple.Config{})
	if err != nil {
		t.Fatal(err)
	}
	for _, target := range []string{"unix://" + directory + "/socket", "unix:socket", "unix-abstract:fourtuple"} {
		client, err := grpc.NewClient(target, grpc.WithContextDialer(dialer.ContextDialer("tcp")),
			grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		if err := check(client); err != nil {
			t.Errorf("%s: %v", target, err)
		}
		client.Close()
	}
}
