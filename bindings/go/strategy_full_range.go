package fourtuple

// FullRange searches the full range once. Since Linux 6.8 the search goes port by port from a start of either parity.
type FullRange struct{}

// Next searches a window of all ports once. The kernel clamps the window to the range of the namespace.
func (FullRange) Next(tried uint32, _ PortRange, _ *Random) (Step, bool) {
	return Step{Kind: Window, Window: AllPorts()}, tried == 0
}

// String returns "full-range".
func (FullRange) String() string { return "full-range" }
