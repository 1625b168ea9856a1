package fourtuple

import (
	"context"
	"net"
	"net/netip"
	"time"
)

// fits reports whether the network has addresses of this family.
func fits(network string, address netip.Addr) bool {
	is4 := address.Unmap().Is4()
	return network == "tcp" || is4 == (network == "tcp4")
}

// resolve returns the addresses of a host name and a port or service name, in the order of the dials.
func (d *Dialer) resolve(ctx context.Context, network, address string) (string, []netip.AddrPort, error) {
	host, service, err := net.SplitHostPort(address)
	if err != nil {
		return "", nil, err
	}
	resolver := d.config.Net.Resolver
	if resolver == nil {
		resolver = net.DefaultResolver
	}
	port, err := resolver.LookupPort(ctx, network, service)
	if err != nil {
		return "", nil, err
	}
	if host == "" {
		// The local system, as in package net.
		host = "127.0.0.1"
		if network == "tcp6" {
			host = "::1"
		}
	}
	found, err := resolver.LookupNetIP(ctx, "ip"+network[len("tcp"):], host)
	if err != nil {
		return "", nil, err
	}
	var families [2][]netip.AddrPort
	for _, ip := range found {
		ip = ip.Unmap()
		if len(d.config.Sources) > 0 && len(d.sourcesFor(ip)) == 0 {
			continue
		}
		// The family of the first address comes first.
		family := 0
		if ip.Is4() != found[0].Unmap().Is4() {
			family = 1
		}
		families[family] = append(families[family], netip.AddrPortFrom(ip, uint16(port)))
	}
	addresses := alternate(families[0], families[1])
	if len(addresses) == 0 {
		return "", nil, &net.AddrError{Err: "no address of a family that the network and the sources have", Addr: host}
	}
	return host, addresses, nil
}

// alternate returns the addresses of both families in turns (RFC 8305, section 4).
func alternate(first, second []netip.AddrPort) []netip.AddrPort {
	var both []netip.AddrPort
	for len(first) > 0 {
		both = append(both, first[0])
		first, second = second, first[1:]
	}
	return append(both, second...)
}

// share returns a context with one address's share of the time that is left, at least 2 s: without a second dial that starts meanwhile, a
// silent address would use up the time of the following addresses.
func share(ctx context.Context, addresses int) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return ctx, func() {}
	}
	// A context ends no later than its parent.
	return context.WithTimeout(ctx, max(time.Until(deadline)/time.Duration(addresses), 2*time.Second))
}

// race dials the addresses in turn, each one after a delay or after a failure, and returns the first connection.
func (d *Dialer) race(ctx context.Context, network, host string, destinations []netip.AddrPort) (*net.TCPConn, Report, error) {
	delay := d.config.Net.FallbackDelay
	if delay == 0 {
		delay = 300 * time.Millisecond // as in package net
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		conn   *net.TCPConn
		report Report
		err    error
	}
	// With room for all results no dial waits for its receiver.
	results := make(chan result, len(destinations))
	started, ended := 0, 0
	start := func() {
		destination := destinations[started]
		ctx, cancel := ctx, context.CancelFunc(func() {})
		if delay < 0 {
			ctx, cancel = share(ctx, len(destinations)-started)
		}
		started++
		go func() {
			defer cancel()
			conn, report, err := d.dial(ctx, network, destination)
			results <- result{conn, report, err}
		}()
	}
	failures := &HostError{Host: host}
	timer := time.NewTimer(max(delay, 0))
	defer func() { timer.Stop() }()
	restart := func() {
		timer.Stop()
		// A new timer: the channel of the old one may have a tick already.
		timer = time.NewTimer(max(delay, 0))
	}
	start()
	for {
		var next <-chan time.Time
		if delay > 0 && started < len(destinations) {
			next = timer.C
		}
		select {
		case <-next:
			start()
			restart()
		case one := <-results:
			ended++
			if one.err == nil {
				cancel()
				go func() {
					for ; ended < started; ended++ {
						if late := <-results; late.conn != nil {
							late.conn.Close()
						}
					}
				}()
				return one.conn, one.report, nil
			}
			failures.Errors = append(failures.Errors, one.err)
			if ended == len(destinations) {
				return nil, Report{}, failures
			}
			if started < len(destinations) && ctx.Err() == nil {
				start()
				restart()
			} else if ended == started {
				return nil, Report{}, failures
			}
		}
	}
}
