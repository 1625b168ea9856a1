/* Counts the open connections of listeners, and finds where the kernel keeps the lengths of their queues.
 *
 *   marks      Every marked listener has an entry of socket storage with its index. The kernel copies the entry to each
 *              connection when the connection is created from its listener (BPF_F_CLONE), so that a connection cannot be
 *              attributed to another listener, and no table of connections can be full.
 *   opened     inet_sock_set_state to SYN_RECV: the connection has been created
 *   closed     inet_sock_set_state to FIN_WAIT1, LAST_ACK or CLOSE, or tcp_destroy_sock. The first event counts.
 *
 * The kernel skips a program while the same program is in progress on this processor, which lasts long if its task is preempted
 * there (1,734 of about 25,000 runs were skipped on a host with twice as many runnable tasks as processors). Therefore two
 * programs count each event: the exchange in the mark lets only the first of them count. */
#include "counting.h"
#include "current.h"
#include "fix_accept.h"

enum { CAN_BE_MAPPED = 1024, IS_COPIED = 512 };

/* The weight of one time in the average is 1/16. */
enum { SMOOTHING = 16, MAX_US = 60000000 };

/* The state of a connection. A listener stays UNSEEN. */
enum seen { UNSEEN = 0, OPEN = 1, CLOSED_AGAIN = 2 };

struct mark {
	u32 listener;
	u32 seen;
	u64 generation;
};

/* What `learn` found out about a socket. */
struct found {
	u64 socket;
	u64 queue_at;
	u64 young_at;
	u64 group; /* 1 + the id of its SO_REUSEPORT group; 0: no group */
	u32 members;
	u32 has_program;
	u32 program; /* id; 0 for classic BPF */
	u32 hole;
	u8 program_name[16];
};

LAYOUT(struct mark, 16);
LAYOUT(struct found, 64);
LAYOUT(struct listener, 64);
LAYOUT(struct everything, 64 * (LISTENERS + 1));

struct {
	NUMBER(type, MAP_SOCKET_STORAGE);
	NUMBER(map_flags, NO_PREALLOCATION | IS_COPIED);
	NUMBER(max_entries, 0);
	TYPE(key, int);
	TYPE(value, struct mark);
} marks SECTION(".maps");

struct {
	NUMBER(type, MAP_ARRAY);
	NUMBER(map_flags, CAN_BE_MAPPED);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct everything);
} listeners SECTION(".maps");

MAP(answer, MAP_ARRAY, 1, u32, struct found);

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
/* Fields of these structs that kernel.h does not have; CO-RE ignores the suffix after three underscores. */
struct request_sock_queue {
	atomic_t young;
};
struct inet_connection_sock___queue {
	struct request_sock_queue icsk_accept_queue;
};
struct sock___backlog {
	struct {
		atomic_t rmem_alloc;
	} sk_backlog;
};
struct bpf_prog_aux {
	u32 id;
	char name[16];
};
struct bpf_prog {
	struct bpf_prog_aux *aux;
};
struct sock_reuseport___program {
	unsigned int reuseport_id;
	struct bpf_prog *prog;
};
#pragma clang attribute pop

/* The worker has closed a connection. Two workers of one listener may overwrite each other's average, which does no harm. */
INLINE void progressed(struct listener *listener)
{
	u64 now = monotonic_ns();
	u64 before = __sync_lock_test_and_set(&listener->progress_ns, now);
	u64 us = (now - before) / 1000;
	u64 mean = listener->mean_us;
	if (us > MAX_US)
		us = MAX_US;
	listener->mean_us = mean + us / SMOOTHING - mean / SMOOTHING;
}

/* Returns the listener of a marked socket. NULL: the socket has no mark, or the entry has got another socket. */
INLINE struct listener *listener_of(struct mark *mark)
{
	u32 only = 0;
	struct everything *all = map_lookup(&listeners, &only);
	struct listener *listener;
	if (!mark || !all)
		return NULL;
	listener = &all->listener[mark->listener & (LISTENERS - 1)];
	return listener->generation == mark->generation ? listener : NULL;
}

INLINE void closed(const struct sock *socket, int from, int to)
{
	struct mark *mark = storage_of(&marks, (void *)socket, NULL, 0);
	struct listener *listener = listener_of(mark);
	if (!listener)
		return;
	if (from == LISTEN)
		listener->socket = 0;
	else if (__sync_val_compare_and_swap(&mark->seen, OPEN, CLOSED_AGAIN) == OPEN)
		__sync_fetch_and_add(&listener->open, -1);
	/* A reset by the client is no progress of the worker. */
	if (to == FIN_WAIT1 || to == LAST_ACK)
		progressed(listener);
}

INLINE void opened(const struct sock *socket)
{
	struct mark *mark = storage_of(&marks, (void *)socket, NULL, 0);
	struct listener *listener = listener_of(mark);
	if (!listener || __sync_val_compare_and_swap(&mark->seen, UNSEEN, OPEN) != UNSEEN)
		return;
	if (__sync_fetch_and_add(&listener->open, 1) == 0)
		listener->progress_ns = monotonic_ns();
	__sync_fetch_and_add(&listener->connections, 1);
}

INLINE void count(u64 *context)
{
	const struct sock *socket = (const struct sock *)context[0];
	int from = (int)context[1];
	int to = (int)context[2];
	if (socket->sk_protocol != TCP)
		return;
	if (to == SYN_RECV)
		opened(socket);
	else if (to == FIN_WAIT1 || to == LAST_ACK || to == CLOSED)
		closed(socket, from, to);
}

SECTION("tp_btf/inet_sock_set_state")
int set_state(u64 *context)
{
	count(context);
	return 0;
}

SECTION("tp_btf/inet_sock_set_state")
int set_state_again(u64 *context)
{
	count(context);
	return 0;
}

SECTION("tp_btf/tcp_destroy_sock")
int destroyed(u64 *context)
{
	closed((const struct sock *)context[0], ESTABLISHED, CLOSED);
	return 0;
}

/* The attaching process runs this program with a descriptor of a socket. */
SECTION("raw_tp/learn")
int learn(u64 *context)
{
	u32 only = 0;
	u64 id = socket_of((u32)context[0]);
	const struct sock *socket = (const struct sock *)id;
	const struct inet_connection_sock___queue *connections = (void *)id;
	const struct sock___backlog *datagrams = (void *)id;
	const struct sock_reuseport *group = NULL;
	struct bpf_prog *program = NULL;
	struct bpf_prog_aux *aux = NULL;
	struct found *found = map_lookup(&answer, &only);
	u16 protocol = 0, members = 0;
	if (!found)
		return 0;
	__builtin_memset(found, 0, sizeof(*found));
	if (!id)
		return 0;
	READ(protocol, socket->sk_protocol);
	found->queue_at = protocol == TCP ? (u64)&socket->sk_ack_backlog : (u64)&datagrams->sk_backlog.rmem_alloc;
	found->young_at = protocol == TCP ? (u64)&connections->icsk_accept_queue.young : found->queue_at;
	READ(group, socket->sk_reuseport_cb);
	/* The lowest bit of the pointer is a flag of sockets that share it. */
	group = (const struct sock_reuseport *)((u64)group & ~3ULL);
	if (group) {
		const struct sock_reuseport___program *its = (const void *)group;
		u32 group_id = 0;
		READ(members, group->num_socks);
		READ(program, its->prog);
		/* The address changes when the group grows (reuseport_grow()), the id does not. */
		READ(group_id, its->reuseport_id);
		found->group = 1 + (u64)group_id;
		found->members = members;
		found->has_program = program != NULL;
	}
	if (program && !READ(aux, program->aux) && aux) {
		READ(found->program, aux->id);
		read_kernel(found->program_name, sizeof(found->program_name), aux->name);
	}
	found->socket = id;
	return 0;
}

char terms[] SECTION("license") = "Dual MIT/GPL";
