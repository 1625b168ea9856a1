package fourtuple

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"testing"
)

// refusal returns the kind of a refused connection. The network in the memory of js makes text of the error.
func refusal() Kind {
	if runtime.GOOS == "js" {
		return Failed
	}
	return Refused
}

// plain returns the dialer of a system that is not Linux.
func plain(t *testing.T, config Config) *Dialer {
	t.Helper()
	if runtime.GOOS != "linux" {
		d, err := New(config)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	d := &Dialer{config: config}
	if err := d.choosePlain(); err != nil {
		t.Fatal(err)
	}
	return d
}

func TestOtherSystemsUsePackageNet(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	destination := netip.MustParseAddrPort(listener.Addr().String())
	d := plain(t, Config{})
	choice := d.Choice()
	if choice.Found != NotLinux || choice.Strategy != (KernelDefault{}) || !strings.HasPrefix(choice.String(), "net.Dialer: the kernel of ") {
		t.Fatalf("%+v: %v", choice, choice)
	}
	conn, report, err := d.openPlain(context.Background(), "tcp", destination)
	if err != nil || report.Source.Port() == 0 || report.Tries != 1 || conn.RemoteAddr().String() != destination.String() {
		t.Fatalf("%+v %v", report, err)
	}
	conn.Close()
	listener.Close()
	var dial *DialError
	_, _, err = d.openPlain(context.Background(), "tcp", destination)
	if !errors.As(err, &dial) || dial.Kind != refusal() || dial.Destination != destination {
		t.Fatalf("%v", err)
	}
	ended, cancel := context.WithTimeout(context.Background(), 0)
	defer cancel()
	if _, _, err = d.openPlain(ended, "tcp", destination); !errors.Is(err, TimedOut) || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("%v", err)
	}
	for field, config := range map[string]Config{
		"Sources": {Sources: []netip.Addr{netip.MustParseAddr("127.0.0.1")}}, "Ports": {Ports: PortRange{1024, 2047}}, "SourcePort": {SourcePort: 7},
		"Device": {Device: "lo"}, "Strategy": {Strategy: FullRange{}},
	} {
		var invalid *ConfigError
		if err := (&Dialer{config: config}).choosePlain(); !errors.As(err, &invalid) || invalid.Field != field || !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("%s: %v", field, err)
		}
	}
}

func TestUnixTargetsOfGRPCAreToldFromHosts(t *testing.T) {
	for address, want := range map[string]string{
		"unix:///run/a.sock": "/run/a.sock", "unix:a.sock": "a.sock", "unix:80/a": "80/a", "\x00abstract": "\x00abstract",
	} {
		if path, ok := unixPath(address); !ok || path != want {
			t.Errorf("%q: %q %v", address, path, ok)
		}
	}
	for _, address := range []string{"unix:3306", "unixes:80", "127.0.0.1:80", "[::1]:80", ""} {
		if path, ok := unixPath(address); ok {
			t.Errorf("%q: %q", address, path)
		}
	}
}

// The hook hears of connections and of failures, of each address of a dial.
func TestOnDialHearsOfEachDial(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	type key struct{}
	ctx := context.WithValue(context.Background(), key{}, "value")
	var heard []DialDone
	d, err := New(Config{OnDial: func(ctx context.Context, done DialDone) {
		if ctx.Value(key{}) != "value" {
			t.Error("the context is not the one of the dial")
		}
		heard = append(heard, done)
	}})
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	conn, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	listener.Close()
	if _, err := d.DialContext(ctx, "tcp4", address); !errors.Is(err, refusal()) {
		t.Fatalf("%v", err)
	}
	if len(heard) != 2 {
		t.Fatalf("%+v", heard)
	}
	good, bad := heard[0], heard[1]
	if good.Network != "tcp" || good.Destination.String() != address || good.Tries != 1 || good.Duration <= 0 || good.Err != nil ||
		good.Source.String() != conn.LocalAddr().String() {
		t.Fatalf("%+v", good)
	}
	if bad.Network != "tcp4" || bad.Strategy == nil || bad.Tries != 1 || !errors.Is(bad.Err, refusal()) {
		t.Fatalf("%+v", bad)
	}
}
