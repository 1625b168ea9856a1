/* Chooses the socket of a SO_REUSEPORT group of an unmodified server, as long as the process that attached the program lives.
 * crates/bpf/src/fix_accept.rs is the other half, and has the same layouts. */
#include "sk_reuseport.h"
#include "branchless.h"
#include "datagram_field.h"
#include "fix_accept.h"

/* Without a heartbeat for this time the kernel's hash chooses. */
#define TIMEOUT_NS 500000000LL
/* The rule after the rules of datagram_field.h. */
#define LEAST_BUSY 4
/* Closed listeners that one packet may meet before the kernel's hash chooses. */
#define TRIES 8
/* The highest key. The key of an open listener is lower, because both of its parts are capped. */
#define CLOSED_KEY 0x7fffffffffffffffLL
#define MAX_LOAD 0x1ffffffeLL
#define PATIENCE 4LL
#define MAX_STALLED 16LL
#define MAX_OPEN 0xffffLL
/* Ages have a resolution of 2^20 ns, about a millisecond. */
#define AGE_SHIFT 20
#define MAX_AGE 0xffLL
/* The mask that takes away the sign. */
#define NUMBER 0x3fffffffffffffffULL
#define UDP 17

struct group {
    /* Each is one word, so that no program run sees half of a change. */
    volatile u64 rule;
    volatile u64 control;
    volatile u64 control_value;
    volatile u64 control_listener; /* receives the control packets */
    volatile u64 members;          /* 0: the kernel's hash chooses */
    volatile u64 lapsed;           /* packets without a heartbeat */
    volatile u64 strays;           /* packets that met closed listeners only */
    u64 room[1];
    volatile u32 member[MEMBERS]; /* indexes of the members' entries in `listeners` */
};

extern struct map listeners; /* array of one struct everything */
extern struct map group;     /* array of one struct group */
extern struct map sockets;   /* by the index of the listener */

static u64 (*const monotonic_ns)(void) = (void *)5;
static long (*const read_kernel)(void *into, u32 size, const void *from) = (void *)113;

/* Returns the key of a listener; the lowest key wins. It compares the load first, then the open connections, then for listeners with
 * open connections the time since the worker closed one, then the distance from a random start.
 *
 * The load is the number of connections that wait for accept() and of handshakes in progress. A worker that has closed no
 * connection for more than 4 times its average is likely to stay busy with the same one: each further average counts as one
 * connection that waits.
 *
 * The kernel's own lengths are read, so that they cannot be lost. Reading does not fault if the socket has been freed meanwhile;
 * select_socket() then refuses it. */
INLINE s64 key_of(struct listener *listener, u32 distance, u64 now)
{
    u32 queue = 0, young = 0;
    read_kernel(&queue, sizeof(queue), (const void *)listener->queue_at);
    read_kernel(&young, sizeof(young), (const void *)listener->young_at);
    s64 open = lower(listener->open & NUMBER, MAX_OPEN);
    s64 is_busy = all_ones_if_negative(-open);
    u64 age = (now - listener->progress_ns) & NUMBER & is_busy;
    s64 mean = listener->mean_us;
    s64 stalled = age / 1000 / (mean + 1ULL) & all_ones_if_negative(-mean);
    stalled = lower(stalled, PATIENCE + MAX_STALLED) - PATIENCE;
    stalled &= ~all_ones_if_negative(stalled);
    s64 load = lower((u64)queue + young + stalled, MAX_LOAD);
    s64 key = load << 34 | open << 18 | lower(age >> AGE_SHIFT, MAX_AGE) << 10 | distance;
    u64 closed = all_ones_if_negative((listener->socket & NUMBER) - 1);
    return key | closed >> 1;
}

/* Returns whether the packet is a datagram or begins a connection. The kernel also runs the program for a RST, a stray ACK and the
 * last ACK of a handshake with SYN cookies. */
INLINE int is_counted(struct context *context)
{
    u8 *tcp = context->data;
    if (context->ip_protocol == UDP || context->migrating)
        return 1;
    if (tcp + 14 > context->data_end)
        return 0;
    return (tcp[13] & 0x16) == 0x02; /* of ACK, RST and SYN only SYN */
}

/* Returns false if the listener is closed. */
INLINE int choose(struct context *context, struct everything *all, u32 index)
{
    index &= LISTENERS - 1;
    if (select_socket(context, &sockets, &index, 0))
        return 0;
    if (is_counted(context))
        __sync_fetch_and_add(&all->listener[index & (LISTENERS - 1)].chosen, 1);
    return 1;
}

INLINE int least_busy(struct context *context, struct everything *all, struct group *its)
{
    u32 members = its->members;
    if (members == 0 || members > MEMBERS)
        return 0;
    u32 start = random_u32() % members;
    s64 best = CLOSED_KEY;
    u64 now = monotonic_ns();
    /* No branch but the end: see branchless.h. */
#pragma clang loop unroll(disable)
    for (u32 distance = 0; distance < MEMBERS; distance++) {
        if (distance >= members)
            break;
        u32 place = (start + distance) % members;
        u32 index = its->member[place & (MEMBERS - 1)];
        best = lower(key_of(&all->listener[index & (LISTENERS - 1)], distance, now), best);
    }
    if (best == CLOSED_KEY)
        return 0;
    u32 place = (start + ((u32)best & (MEMBERS - 1))) % members;
    u32 index = its->member[place & (MEMBERS - 1)] & (LISTENERS - 1);
    u64 socket = all->listener[index].socket;
    if (choose(context, all, index))
        return 1;
    /* The socket was closed without a report, as UDP sockets are. The entry is skipped from now on, unless it has got a new
     * socket. A second round would exceed the verifier's limit, so the kernel's hash chooses for this packet. */
    __sync_val_compare_and_swap(&all->listener[index].socket, socket, 0);
    return 0;
}

SECTION("sk_reuseport/migrate")
enum verdict fix_accept(struct context *context)
{
    u32 zero = 0;
    struct everything *all = map_lookup(&listeners, &zero);
    struct group *its = map_lookup(&group, &zero);
    if (!all || !its)
        return PASS;
    if ((s64)(monotonic_ns() - all->beat_ns) > TIMEOUT_NS) {
        __sync_fetch_and_add(&its->lapsed, 1);
        return PASS;
    }
    u64 control = its->control;
    if (control & 0xff && is_control(context, control, its->control_value)) {
        if (choose(context, all, its->control_listener))
            return PASS;
    }
    u64 rule = its->rule;
    if ((rule & 0xff) == LEAST_BUSY) {
        if (least_busy(context, all, its))
            return PASS;
    } else {
        u32 number = number_of(context, rule);
        u32 members = its->members;
        if (members != 0) {
#pragma clang loop unroll(disable)
            for (int tries = 0; tries < TRIES; tries++) {
                u32 index = its->member[number % members & (MEMBERS - 1)];
                if (choose(context, all, index))
                    return PASS;
                number++;
            }
        }
    }
    __sync_fetch_and_add(&its->strays, 1);
    /* Without a selection the kernel's hash chooses among the group. */
    return PASS;
}
