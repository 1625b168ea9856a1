/* Chooses the socket of a SO_REUSEPORT group that gets a datagram, by a table that may be changed at any time.
 * crates/bpf/src/group_map.rs is the other half, and has the same layouts. */
#include "datagram_field.h"

/* Entries of the table, a power of two. */
#define SLOTS 4096
/* Seats for data packets; the seat after the last is for control packets. */
#define SEATS 1024
/* Slots that the program tries when the chosen seat has no socket. */
#define TRIES 8

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
