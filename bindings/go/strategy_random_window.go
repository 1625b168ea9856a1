package fourtuple

import "fmt"

// RandomWindow searches a window of Width ports at a random position, up to Tries times, and then the full range.
type RandomWindow struct {
	// Width is the number of ports per window, at least 1.
	Width uint16
	// Tries is the number of windows, at least 1.
	Tries uint16
	// ThenFullRange says whether the dial searches the full range on the same descriptor after all windows were full.
	ThenFullRange bool
}

// DefaultRandomWindow returns two windows of 500 ports and then the full range: the best width of Cloudflare, "connect() - why are
// you so slow?".
func DefaultRandomWindow() RandomWindow {
	return RandomWindow{Width: 500, Tries: 2, ThenFullRange: true}
}

// Next returns a window at a random position. A window that is wider than the range is the range.
func (s RandomWindow) Next(tried uint32, ports PortRange, random *Random) (Step, bool) {
	if tried >= uint32(s.Tries) {
		return Step{Kind: Window, Window: AllPorts()}, s.ThenFullRange && tried == uint32(s.Tries)
	}
	window := ports
	if width := uint32(s.Width); width <= ports.Len() {
		window.Low = ports.Low + uint16(random.Below(ports.Len()-width+1))
		window.High = window.Low + (s.Width - 1)
	}
	return Step{Kind: Window, Window: window}, true
}

// String returns "random-window:WIDTH".
func (s RandomWindow) String() string { return fmt.Sprintf("random-window:%d", s.Width) }

func (s RandomWindow) check() error {
	if s.Width == 0 || s.Tries == 0 {
		return fmt.Errorf("a RandomWindow needs a Width and a Tries of at least 1")
	}
	return nil
}
