package fourtuple

// KernelDefault sets no socket option: the kernel's own search, as in an unchanged program.
type KernelDefault struct{}

// Next lets the kernel search its range once.
func (KernelDefault) Next(tried uint32, _ PortRange, _ *Random) (Step, bool) {
	return Step{Kind: Search}, tried == 0
}

// String returns "kernel-default".
func (KernelDefault) String() string { return "kernel-default" }
