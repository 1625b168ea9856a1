package fourtuple

import (
	"net/netip"
	"sync"
	"time"
)

const (
	// firstWait is the first back-off of a source. It doubles with each consecutive failure, up to longestWait.
	firstWait   = 100 * time.Millisecond
	longestWait = 10 * time.Second
	// mostPaths bounds the memory for paths that failed or were counted.
	mostPaths = 4096
)

// path is a source address and a destination. A source that is not valid stands for the choice of the kernel.
type path struct {
	source      netip.Addr
	destination netip.AddrPort
}

// pathState is what a dialer remembers of a path that failed or whose sockets it counted.
type pathState struct {
	// failed is the time of the last failure, and until the end of the back-off after it.
	failed, until time.Time
	wait          time.Duration

	counting  sync.Mutex // held during a census; protects the fields below
	counted   time.Time
	cost      time.Duration
	census    *Census
	censusErr error
}

// paths holds the state of paths. The zero value is empty. The kernel decides each dial: a lost state costs one more failure.
type paths struct {
	sync.Mutex
	states map[path]*pathState
}

// state returns the state of a path, and makes one if there is none.
func (p *paths) state(of path) *pathState {
	p.Lock()
	defer p.Unlock()
	return p.locked(of)
}

func (p *paths) locked(of path) *pathState {
	state := p.states[of]
	if state == nil {
		if p.states == nil {
			p.states = make(map[path]*pathState)
		}
		for other := range p.states {
			if len(p.states) < mostPaths {
				break
			}
			delete(p.states, other)
		}
		state = new(pathState)
		p.states[of] = state
	}
	return state
}

// fail backs off a path. A path without a free port may get one at any time, so its back-off does not grow.
func (p *paths) fail(of path, isExhausted bool, now time.Time) {
	p.Lock()
	defer p.Unlock()
	state := p.locked(of)
	if isExhausted {
		state.wait = firstWait
	} else {
		state.wait = min(max(2*state.wait, firstWait), longestWait)
	}
	state.failed, state.until = now, now.Add(state.wait)
}

// succeed ends the back-off of a path.
func (p *paths) succeed(of path) {
	p.Lock()
	defer p.Unlock()
	if state := p.states[of]; state != nil {
		state.failed, state.until, state.wait = time.Time{}, time.Time{}, 0
	}
}

// choose returns the source for a dial: the first one from start on that is not backed off, or else the one whose last failure is the
// oldest. It skips the sources that failed at or after begun, the start of the dial; zero skips none. isBackedOff says whether the source is
// backed off.
func (p *paths) choose(sources []netip.Addr, start uint32, to netip.AddrPort, begun, now time.Time) (source netip.Addr, isBackedOff, ok bool) {
	p.Lock()
	defer p.Unlock()
	var oldest time.Time
	for i := range sources {
		candidate := sources[(uint64(start)+uint64(i))%uint64(len(sources))]
		state := p.states[path{candidate, to}]
		if state == nil {
			return candidate, false, true
		}
		if !begun.IsZero() && !state.failed.Before(begun) {
			continue
		}
		if !now.Before(state.until) {
			return candidate, false, true
		}
		if !ok || state.failed.Before(oldest) {
			source, oldest, isBackedOff, ok = candidate, state.failed, true, true
		}
	}
	return source, isBackedOff, ok
}

// count returns a census of the path that is at most one second old. rest also keeps a census for 100 times its duration, for callers
// that can use an older one.
func (p *paths) count(of path, ports PortRange, rest bool) (*Census, error) {
	state := p.state(of)
	state.counting.Lock()
	defer state.counting.Unlock()
	age := time.Second
	if rest {
		age = max(age, 100*state.cost)
	}
	if now := time.Now(); state.counted.IsZero() || now.Sub(state.counted) >= age {
		state.census, state.censusErr = takeCensus(of.source, of.destination, ports)
		state.counted = time.Now()
		state.cost = state.counted.Sub(now)
	}
	return state.census, state.censusErr
}
