/* Chooses the listener of a SO_REUSEPORT group whose worker has the least to do: at each SYN, and for each connection
 * of a listener that goes away. crates/bpf/src/least_busy.rs is the other half, and has the same layouts. */
#include "sk_reuseport.h"
#include "branchless.h"

#define SEATS 64
/* The number of empty seats that one packet may clear. If it meets more, the kernel's hash chooses this time. */
#define ROUNDS 8
/* The highest key. The key of a seat is lower, because score and open connections are capped. */
#define NOBODY 0x7fffffffffffffffLL
#define MAX_SCORE 0x7ffffffeLL
#define MAX_OPEN 0xffffffLL
/* The mask of counters that user space writes, without the sign bit. */
#define NUMBER 0x3fffffffffffffffULL
#define NOT_FOUND (-2)

/* Counters of one worker, on a cache line of their own. */
struct seat {
    volatile u64 listener; /* the listener's socket cookie; 0: the seat is free */
    volatile u64 claimed;  /* connections that this program sent here */
    volatile u64 accepted; /* claimed connections that were accepted or are known to be lost */
    volatile u64 busy;     /* requests in progress */
    volatile u64 open;     /* open connections */
    u64 room[3];
};

struct state {
    volatile u64 seats; /* how many may be in use, at most SEATS */
    volatile u64 cursor;
    u64 room[6];
    struct seat seat[SEATS];
};

extern struct map state;     /* array of one struct state */
extern struct map listeners; /* sockets by seat */

/* Returns the key of a seat; the lowest key wins. It compares connections on their way plus requests in progress first, then
 * open connections, then the distance from the cursor. A free seat has the highest key. */
INLINE s64 key_of(struct seat *seat, u32 distance)
{
    s64 coming = seat->claimed - seat->accepted;
    /* The number is below 0 if a connection with a SYN cookie was claimed for another worker. */
    coming &= ~all_ones_if_negative(coming);
    s64 score = lower(coming + (seat->busy & NUMBER), MAX_SCORE);
    s64 key = score << 32 | lower(seat->open & NUMBER, MAX_OPEN) << 8 | distance;
    u64 free = all_ones_if_negative((seat->listener & NUMBER) - 1);
    /* For a free seat this is the highest key, without the constant: newer verifiers (seen on 6.18) treat a mask with a constant as
     * a branch. */
    return key | free >> 1;
}

/* Returns whether the packet begins a connection. The kernel also runs the program for a RST, a stray ACK and the last ACK of a
 * handshake with SYN cookies, which must not be counted: the SYN was counted already. */
INLINE int claims(struct context *context)
{
    u8 *tcp = context->data;
    if (context->migrating)
        return 1;
    if (tcp + 14 > context->data_end)
        return 0;
    return (tcp[13] & 0x16) == 0x02; /* of ACK, RST and SYN only SYN */
}

SECTION("sk_reuseport/migrate")
enum verdict least_busy(struct context *context)
{
    u32 zero = 0;
    struct state *all = map_lookup(&state, &zero);
    if (!all)
        return PASS;
    u32 seats = all->seats;
    if (seats == 0 || seats > SEATS)
        return PASS;
    u32 start = (u32)__sync_fetch_and_add(&all->cursor, 1) % seats;

    /* Free seats are skipped, so a turn over all 64 seats visits the seats in use in the same order. */
#pragma clang loop unroll(disable)
    for (int round = 0; round < ROUNDS; round++) {
        s64 best = NOBODY;
#pragma clang loop unroll(disable)
        for (u32 distance = 0; distance < SEATS; distance++)
            best = lower(key_of(&all->seat[(start + distance) & (SEATS - 1)], distance), best);
        if (best == NOBODY)
            break;
        u32 index = (start + (u32)best) & (SEATS - 1);
        struct seat *seat = &all->seat[index];
        /* Read before the selection, so that a worker that takes the seat in between does not lose it below. */
        u64 listener = seat->listener;
        long error = select_socket(context, &listeners, &index, 0);
        if (!error) {
            if (claims(context))
                __sync_fetch_and_add(&seat->claimed, 1);
            return PASS;
        }
        /* The listener is closed but was not removed: its worker was killed. The program skips this seat until a worker
         * takes it. */
        if (error == NOT_FOUND)
            __sync_val_compare_and_swap(&seat->listener, listener, 0);
        else
            break;
    }
    /* Without a selection the kernel's hash chooses among the group. */
    return PASS;
}
