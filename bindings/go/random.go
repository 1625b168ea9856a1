package fourtuple

import "math/bits"

// Random is the random number generator of the strategies: wyrand, as in the Rust crate fastrand. Equal seeds give equal steps in
// all languages. It is no cryptographic generator. A Random must not be used by two goroutines at the same time.
type Random struct {
	state uint64
}

// NewRandom returns a generator with this seed.
func NewRandom(seed uint64) *Random {
	return &Random{state: seed}
}

func (r *Random) next() uint64 {
	r.state += 0x2d358dccaa6c78a5
	high, low := bits.Mul64(r.state, r.state^0x8bb84b93962eacc9)
	return low ^ high
}

// Below returns a number from 0 to n-1; n must not be 0. The multiplication without a bias is Lemire's.
func (r *Random) Below(n uint32) uint32 {
	if n == 0 {
		panic("fourtuple: Random.Below(0)")
	}
	product := uint64(uint32(r.next())) * uint64(n)
	if uint32(product) < n {
		for threshold := -n % n; uint32(product) < threshold; {
			product = uint64(uint32(r.next())) * uint64(n)
		}
	}
	return uint32(product >> 32)
}

// port returns a port of the range.
func (r *Random) port(ports PortRange) uint16 {
	if ports == AllPorts() {
		return uint16(r.next())
	}
	return ports.Low + uint16(r.Below(ports.Len()))
}
