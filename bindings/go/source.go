package fourtuple

import (
	"fmt"
	"net/netip"
	"strings"
)

// MostSources is the maximum number of source addresses of a Config.
const MostSources = 4096

// ParseSources reads a comma-separated list of addresses and networks, such as "10.0.0.7,10.0.1.0/28". A network stands for all its
// hosts; the first and the last address of an IPv4 network are not hosts. Duplicates are ignored.
func ParseSources(text string) ([]netip.Addr, error) {
	var sources []netip.Addr
	seen := make(map[netip.Addr]bool)
	add := func(address netip.Addr) error {
		if seen[address] {
			return nil
		}
		if len(sources) == MostSources {
			return fmt.Errorf("%q holds more than %d source addresses; take a smaller network", text, MostSources)
		}
		seen[address] = true
		sources = append(sources, address)
		return nil
	}
	for _, part := range strings.Split(text, ",") {
		part = strings.TrimSpace(part)
		if address, err := netip.ParseAddr(part); err == nil {
			if err := add(address.Unmap()); err != nil {
				return nil, err
			}
			continue
		}
		network, err := netip.ParsePrefix(part)
		if err != nil {
			return nil, fmt.Errorf("%q is not a source: expected an address such as 10.0.0.7, or a network such as 127.0.0.0/28", part)
		}
		hosts, err := hosts(network.Masked())
		if err != nil {
			return nil, err
		}
		for _, host := range hosts {
			if err := add(host); err != nil {
				return nil, err
			}
		}
	}
	return sources, nil
}

// hosts returns the addresses of a network that a host can have.
func hosts(network netip.Prefix) ([]netip.Addr, error) {
	bits := network.Addr().BitLen() - network.Bits()
	if 1<<min(bits, 16) > MostSources {
		return nil, fmt.Errorf("%v holds more than %d source addresses; take a smaller network", network, MostSources)
	}
	var all []netip.Addr
	for address := network.Addr(); address.IsValid() && network.Contains(address); address = address.Next() {
		all = append(all, address)
	}
	if network.Addr().Is4() && bits > 1 {
		all = all[1 : len(all)-1]
	}
	return all, nil
}
