package fourtuple

import "fmt"

// SelectTestRepeat binds a random port, connects, and repeats this with another port on a conflict: "select, test, repeat" of
// Cloudflare, "connect() - why are you so slow?".
//
// The strategy needs no socket option and works on every kernel. But until a socket that was bound by number is closed, no automatic
// choice of any program in the namespace takes its port.
type SelectTestRepeat struct {
	// Tries is the number of ports to try before the dial fails, at least 1.
	Tries uint16
}

// DefaultSelectTestRepeat returns 100 tries: with 1% of the ports free, two of three dials find one.
func DefaultSelectTestRepeat() SelectTestRepeat {
	return SelectTestRepeat{Tries: 100}
}

// Next draws a random port for each try.
func (s SelectTestRepeat) Next(tried uint32, ports PortRange, random *Random) (Step, bool) {
	if tried >= uint32(s.Tries) {
		return Step{}, false
	}
	return Step{Kind: Bind, Port: random.port(ports)}, true
}

// String returns "select-test-repeat".
func (SelectTestRepeat) String() string { return "select-test-repeat" }

func (s SelectTestRepeat) check() error {
	if s.Tries == 0 {
		return fmt.Errorf("a SelectTestRepeat needs a Tries of at least 1")
	}
	return nil
}
