/* Gives packets of one 4-tuple many 4-tuples: it sets their source port to a random port of a range. The kernel's hash then
 * distributes them over a group of sockets. crates/bpf/src/source_port.rs is the other half, and has the same layouts. */
#include "udp_packet.h"

struct state {
    struct target target;
    u32 first; /* first port of the range, in the machine's byte order */
    u32 ports; /* number of ports; 0: every packet passes unchanged */
    struct counts counts[PROCESSORS];
};

extern struct map state; /* array of one struct state */

/* Updates the checksum for the new port (RFC 1624). */
INLINE u16 updated(u16 checksum, u16 old, u16 new)
{
    u32 sum = (u16)~checksum + (u16)~old + new;
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    u16 result = ~sum;
    /* The value 0 means that there is no checksum (RFC 768). */
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
    /* IPv6 requires a checksum (RFC 8200, 8.1). The packet passes unchanged, and the kernel handles it. */
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
