/* Passes packets for a group of sockets to processors, independently of which processor the device interrupted. Its
 * counterpart is crates/bpf/src/cpu_map.rs, which has the same layouts. */
#include "udp_packet.h"

enum kind { IN_TURN = 0, AT_RANDOM = 1, BY_KEY = 2 };

/* The largest offset into the payload that the verifier accepts. */
#define FARTHEST 0x3fff

struct state {
    struct target target;
    u32 processors; /* number of processors in the map; 0: every packet passes */
    u32 kind;
    u32 offset; /* offset of the key within the payload */
    u32 width;
    u32 mask;
    u32 hole;
    volatile u64 cursor;
    u64 room[1];
    struct counts counts[PROCESSORS];
};

extern struct map state;      /* array of one struct state */
extern struct map processors; /* CPUMAP */

/* Returns the key of a packet, or 0 if the packet is too short. */
INLINE u32 key_of(struct state *all, u8 *payload, u8 *end)
{
    u8 *at = payload + (all->offset & FARTHEST);
    u32 width = all->width;
    if (width == 4 && at + 4 <= end)
        return __builtin_bswap32(*(u32 *)at) & all->mask;
    if (width == 2 && at + 2 <= end)
        return __builtin_bswap16(*(u16 *)at) & all->mask;
    if (width == 1 && at + 1 <= end)
        return *at & all->mask;
    return 0;
}

SECTION("xdp")
long cpu_map(struct context *context)
{
    u32 zero = 0;
    struct state *all = map_lookup(&state, &zero);
    if (!all)
        return PASS;
    struct counts *counts = &all->counts[processor() & (PROCESSORS - 1)];
    int is_ipv4 = 0;
    u8 *udp = udp_to(context, &all->target, &is_ipv4);
    u32 among = all->processors;
    if (!udp || !among) {
        __sync_fetch_and_add(&counts->passed, 1);
        return PASS;
    }
    u32 number;
    if (all->kind == BY_KEY)
        number = key_of(all, udp + 8, (u8 *)(u64)context->data_end);
    else if (all->kind == AT_RANDOM)
        number = random_u32();
    else
        number = __sync_fetch_and_add(&all->cursor, 1);
    /* If the processor is not in the map, the packet passes; it is not dropped. */
    long action = redirect_to(&processors, number % among, PASS);
    if (action == PASS)
        __sync_fetch_and_add(&counts->passed, 1);
    else
        __sync_fetch_and_add(&counts->changed, 1);
    return action;
}
