/* Chooses the socket of a SO_REUSEPORT group that gets a datagram, by a table that may be changed at any time.
 * crates/bpf/src/group_map.rs is the other half, and has the same layouts. */
#include "sk_reuseport.h"

typedef unsigned short u16;

/* Entries of the table, a power of two. */
#define SLOTS 4096
/* Seats for data packets; the seat after the last is for control packets. */
#define SEATS 1024
/* Slots that the program tries when the chosen seat has no socket. */
#define TRIES 8
/* Size of the UDP header, at which the packet starts for this program. */
#define UDP_HEADER 8
#define SWAPPED(number) ((u16)__builtin_bswap16(number))
#define IPV4 SWAPPED(0x0800)
/* The value of BPF_HDR_START_NET: offsets count from the network header. */
#define FROM_NETWORK 1

enum rule { BY_HASH = 0, AT_RANDOM = 1, BY_KEY = 2, BY_PROCESSOR = 3 };
enum control { NOTHING = 0, BY_BYTES = 1, BY_HOPS = 2, BY_SOURCE_PORT = 3, BY_NEIGHBOUR = 4 };

struct state {
    /* Kind, width, offset and mask of the field that chooses a slot, and of the field that marks control packets. Each is one
     * word, so that no program run sees half of a change. */
    volatile u64 rule;
    volatile u64 control;
    volatile u64 control_value;
    volatile u64 strays; /* packets that met only empty seats, so that the kernel's hash chose */
    u64 room[4];
    volatile u32 slot[SLOTS];
};

extern struct map state;   /* array of one struct state */
extern struct map sockets; /* by seat */

static u32 (*const random_u32)(void) = (void *)7;
static u32 (*const processor)(void) = (void *)8;
static long (*const load)(struct context *context, u32 offset, void *to, u32 length) = (void *)26;
static long (*const load_from)(struct context *context, u32 offset, void *to, u32 length, u32 from) = (void *)68;

/* Reads from the packet, counted from the UDP header. Returns false if the packet is too short. */
INLINE int number_at(struct context *context, u32 offset, u32 width, u32 *number)
{
    if (width == 4) {
        u32 word = 0;
        if (load(context, offset, &word, 4))
            return 0;
        *number = __builtin_bswap32(word);
    } else if (width == 2) {
        u16 half = 0;
        if (load(context, offset, &half, 2))
            return 0;
        *number = SWAPPED(half);
    } else {
        u8 byte = 0;
        if (load(context, offset, &byte, 1))
            return 0;
        *number = byte;
    }
    return 1;
}

INLINE u32 width_of(u64 word) { return word >> 8 & 0xff; }
INLINE u32 offset_of(u64 word) { return word >> 16 & 0xffff; }
INLINE u32 mask_of(u64 word) { return word >> 32; }

INLINE int hops_are(struct context *context, u32 value)
{
    u8 hops = 0;
    u32 offset = (u16)context->ethernet_protocol == IPV4 ? 8 : 7;
    return !load_from(context, offset, &hops, 1, FROM_NETWORK) && hops == value;
}

INLINE int is_control(struct context *context, u64 control, u32 value)
{
    u32 number = 0;
    switch (control & 0xff) {
    case BY_NEIGHBOUR:
        if (!hops_are(context, 255))
            return 0;
        /* fall through */
    case BY_BYTES:
        return number_at(context, UDP_HEADER + offset_of(control), width_of(control), &number) &&
               (number & mask_of(control)) == value;
    case BY_HOPS:
        return hops_are(context, value);
    case BY_SOURCE_PORT:
        return number_at(context, 0, 2, &number) && number == value;
    default:
        return 0;
    }
}

INLINE u32 number_of(struct context *context, u64 rule)
{
    u32 number = 0;
    switch (rule & 0xff) {
    case AT_RANDOM:
        return random_u32();
    case BY_KEY:
        return number_at(context, UDP_HEADER + offset_of(rule), width_of(rule), &number) ? number & mask_of(rule) : 0;
    case BY_PROCESSOR:
        return processor();
    default:
        return context->hash;
    }
}

SECTION("sk_reuseport/migrate")
enum verdict group_map(struct context *context)
{
    u32 zero = 0;
    struct state *all = map_lookup(&state, &zero);
    if (!all)
        return PASS;
    u64 control = all->control;
    if (control & 0xff && is_control(context, control, all->control_value)) {
        u32 seat = SEATS;
        if (!select_socket(context, &sockets, &seat, 0))
            return PASS;
    }
    u32 number = number_of(context, all->rule);
#pragma clang loop unroll(disable)
    for (int tries = 0; tries < TRIES; tries++) {
        u32 seat = all->slot[number & (SLOTS - 1)];
        if (!select_socket(context, &sockets, &seat, 0))
            return PASS;
        /* The socket is closed, for example after its process was killed. The next slots usually have other seats. */
        number++;
    }
    __sync_fetch_and_add(&all->strays, 1);
    /* Without a selection the kernel's hash chooses among the group. */
    return PASS;
}
