/* Gives packets of one 4-tuple many: their source port becomes a random one of so many. The kernel's hash then spreads them
 * over a group of sockets. crates/bpf/src/source_port.rs is the other half, and has the same layouts. */
#include "udp_packet.h"

struct state {
    struct target target;
    u32 first; /* of the ports, in the machine's order */
    u32 ports; /* how many there are, 0: nothing is done */
    struct counts counts[PROCESSORS];
};

extern struct map state; /* array of one struct state */

/* RFC 1624: the sum over the packet, of which the old port was a part, with the new one in its place. */
INLINE u16 updated(u16 checksum, u16 old, u16 new)
{
    u32 sum = (u16)~checksum + (u16)~old + new;
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    u16 result = ~sum;
    /* 0 says that there is none (RFC 768). */
    return result ? result : 0xffff;
}

SECTION("xdp")
enum action source_port(struct context *context)
{
    u32 zero = 0;
    struct state *all = map_lookup(&state, &zero);
    if (!all)
        return PASS;
    struct counts *counts = &all->counts[processor() & (PROCESSORS - 1)];
    int is_ipv4 = 0;
    u8 *udp = udp_to(context, &all->target, &is_ipv4);
    u32 ports = all->ports;
    if (!udp || !ports) {
        __sync_fetch_and_add(&counts->passed, 1);
        return PASS;
    }
    u16 checksum = *(u16 *)(udp + 6);
    /* Without a checksum IPv6 does not take it (RFC 8200, 8.1): that is the kernel's to say. */
    if (!checksum && !is_ipv4) {
        __sync_fetch_and_add(&counts->passed, 1);
        return PASS;
    }
    u16 old = *(u16 *)udp;
    u16 new = SWAPPED(all->first + random_u32() % ports);
    *(u16 *)udp = new;
    if (checksum)
        *(u16 *)(udp + 6) = updated(checksum, old, new);
    __sync_fetch_and_add(&counts->changed, 1);
    return PASS;
}
