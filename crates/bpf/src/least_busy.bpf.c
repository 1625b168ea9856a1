/* Chooses the listener of a SO_REUSEPORT group whose worker has the least to do: at each SYN, and for each connection
 * of a listener that goes away. crates/bpf/src/least_busy.rs is the other half, and has the same layouts. */
#include "sk_reuseport.h"

#define SEATS 64
/* Seats found empty that one packet may clear away. With more of them the kernel's hash chooses this time. */
#define ROUNDS 8
/* No key is as high: scores are cut off below. */
#define NOBODY (~0ULL)
#define NOT_FOUND (-2)

/* Counters of one worker, on a cache line of their own. */
struct seat {
    volatile u64 listener; /* the listener's socket cookie; 0: the seat is free */
    volatile u64 claimed;  /* connections sent here, by this program */
    volatile u64 accepted; /* of these the worker has, or knows that they never come */
    volatile u64 busy;     /* requests at work */
    volatile u64 open;     /* connections */
    u64 room[3];
};

struct state {
    volatile u64 seats; /* how many are in use, at most SEATS */
    volatile u64 cursor;
    u64 room[6];
    struct seat seat[SEATS];
};

extern struct map state;     /* array of one struct state */
extern struct map listeners; /* sockets by seat */

INLINE u64 capped(u64 value, u64 limit)
{
    return value < limit ? value : limit;
}

/* Low is good: what is on its way or at work first, then open connections, then the distance from the cursor. One number
 * for all, because comparing it needs one branch: the verifier follows each. */
INLINE u64 key_of(struct seat *seat, u32 distance)
{
    u64 claimed = seat->claimed;
    u64 accepted = seat->accepted;
    /* A cookie's SYN was perhaps claimed elsewhere: see `claims`. */
    u64 coming = accepted < claimed ? claimed - accepted : 0;
    u64 score = capped(coming + seat->busy, 0xfffffffe);
    return score << 32 | capped(seat->open, 0xffffff) << 8 | distance;
}

INLINE u32 seat_at(u32 start, u32 distance, u32 seats)
{
    u32 index = start + distance;
    return (index < seats ? index : index - seats) & (SEATS - 1);
}

/* Whether the packet begins a connection. A RST, a stray ACK or the last ACK of a handshake with SYN cookies looks for a
 * listener too, and must not be counted: the SYN was. */
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

#pragma clang loop unroll(disable)
    for (int round = 0; round < ROUNDS; round++) {
        u64 best = NOBODY;
#pragma clang loop unroll(disable)
        for (u32 distance = 0; distance < SEATS; distance++) {
            if (distance >= seats)
                break;
            struct seat *seat = &all->seat[seat_at(start, distance, seats)];
            if (!seat->listener)
                continue;
            u64 key = key_of(seat, distance);
            if (key < best)
                best = key;
        }
        if (best == NOBODY)
            break;
        u32 index = seat_at(start, (u8)best, seats);
        struct seat *seat = &all->seat[index];
        /* Read before trying, so that a worker who takes the seat in between is not shown out below. */
        u64 listener = seat->listener;
        long error = select_socket(context, &listeners, &index, 0);
        if (!error) {
            if (claims(context))
                __sync_fetch_and_add(&seat->claimed, 1);
            return PASS;
        }
        /* Closed without a word: its worker was killed. Nobody looks here again until somebody takes the seat. */
        if (error == NOT_FOUND)
            __sync_val_compare_and_swap(&seat->listener, listener, 0);
        else
            break;
    }
    /* Without a selection the kernel's hash chooses among the group. */
    return PASS;
}
