/* How long connect() of TCP looks for a source port, and how long the handshake takes after it.
 *
 *   start   inet_sock_set_state CLOSE -> SYN_SENT, in the task that connects
 *   end     IPv4: fib_table_lookup of the same task for the same destination with a source port, for after the search the
 *           route is looked up again (ip_route_newports); IPv6: net_dev_queue of the socket's SYN
 *   failure SYN_SENT -> CLOSE; within the call the errno is what the system call gives back (sys_exit), else sk_err
 *   peer    SYN_SENT -> ESTABLISHED
 *
 * With fexit (another tier, which not every kernel has) start and end are those of __inet_hash_connect, the search itself.
 *
 * Everything is counted here; only a sample of single searches goes through the ring. */
#include "counting.h"

/* The same numbers and structs are in connect_search.rs. */
enum { SOCKETS = 65536, CALLS = 16384, TUPLES = 2048, RING_BYTES = 1 << 20 };
/* Samples are taken in windows of 2^24 ns (17 ms). */
enum { WINDOW_BITS = 24 };
/* Errno of a failure: 0 nobody told, 255 closed by the program while the handshake went on. */
enum { ERRNOS = 256, UNKNOWN = 0, CLOSED_EARLY = 255, EADDRNOTAVAIL = 99 };
enum flags { HAS_PROCESS = 1, HAS_NAME = 2, HAS_ADDRESS = 4, HAS_PORT = 8, HAS_CGROUP = 16 };
enum times { EVEN, ODD, HANDSHAKE, FAILED, TIMES };

/* What to trace; unset fields are not looked at. */
struct wanted {
	u64 began_ns;
	u64 cgroup;
	u64 namespace_device;
	u64 namespace_inode;
	u64 outlier_ns;
	u32 flags;
	u32 process;
	u32 samples_per_window;
	u32 outliers_per_window;
	u8 name[16];
	u8 address[16];
	u16 port;
	u16 hole[3];
};

struct tuple_key {
	u8 address[16]; /* IPv4 as ::ffff:a.b.c.d */
	u32 process;
	u16 port;
	u16 hole;
};

struct tuple {
	u8 name[16];
	u64 searches[2];
	u64 search_ns[2];
	u64 failed;
	u64 no_port;
	u64 given_port;
	u64 established;
	u32 buckets[2][COARSE];
};

struct totals {
	u64 lost_events;
	u64 lost_starts;
	u64 lost_tuples;
	u64 without_end; /* established, and the end of the search was not seen */
	u64 given_port;
	u64 switched; /* searches during which the task was not running all the time */
	u64 waiting; /* failed calls whose errno is still to come */
	u64 window;
	u32 samples_taken;
	u32 outliers_taken;
	u64 errnos[ERRNOS];
	struct histogram times[TIMES];
};

/* A socket in SYN_SENT. */
struct attempt {
	struct tuple_key key;
	u64 task;
	u64 started_ns;
	u64 ended_ns; /* of the search; 0: it goes on */
	u64 switches;
};

/* A task's last connect(). */
struct call {
	struct tuple_key key;
	u64 socket;
	u64 failed_ns; /* how long it took until it failed; 0: it has not */
};

struct event {
	u64 at_ns;
	u64 search_ns;
	u8 address[16];
	u32 process;
	u16 port;
	u16 source_port; /* 0: the search failed */
};

LAYOUT(struct wanted, 96);
LAYOUT(struct tuple_key, 24);
LAYOUT(struct tuple, 80 + 8 * COARSE);
LAYOUT(struct totals, 72 + 8 * ERRNOS + TIMES * sizeof(struct histogram));
LAYOUT(struct attempt, 56);
LAYOUT(struct call, 40);
LAYOUT(struct event, 40);

struct {
	NUMBER(type, MAP_ARRAY);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct wanted);
} settings SECTION(".maps");

struct {
	NUMBER(type, MAP_ARRAY);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct totals);
} sums SECTION(".maps");

/* One tuple of zeroes: it is too long for the stack. */
struct {
	NUMBER(type, MAP_ARRAY);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct tuple);
} blank SECTION(".maps");

struct {
	NUMBER(type, MAP_HASH);
	NUMBER(max_entries, TUPLES);
	TYPE(key, struct tuple_key);
	TYPE(value, struct tuple);
} tuples SECTION(".maps");

struct {
	NUMBER(type, MAP_HASH);
	NUMBER(max_entries, SOCKETS);
	TYPE(key, u64);
	TYPE(value, struct attempt);
} attempts SECTION(".maps");

struct {
	NUMBER(type, MAP_HASH);
	NUMBER(max_entries, CALLS);
	TYPE(key, u64);
	TYPE(value, struct call);
} calls SECTION(".maps");

struct {
	NUMBER(type, MAP_RING);
	NUMBER(max_entries, RING_BYTES);
} ring SECTION(".maps");

INLINE struct totals *the_totals(void)
{
	u32 only = 0;
	return map_lookup(&sums, &only);
}

INLINE struct tuple *tuple_of(struct totals *totals, const struct tuple_key *key)
{
	struct tuple *tuple = map_lookup(&tuples, key);
	if (!tuple)
		ADD(totals->lost_tuples, 1);
	return tuple;
}

/* In the task that connects, so that the name is its own. */
INLINE void make_tuple(const struct tuple_key *key)
{
	u32 only = 0;
	u8 name[16];
	struct tuple *tuple;
	if (map_lookup(&tuples, key))
		return;
	tuple = map_lookup(&blank, &only);
	if (!tuple)
		return;
	map_update(&tuples, key, tuple, NOT_TWICE);
	tuple = map_lookup(&tuples, key);
	if (!tuple)
		return;
	current_name(name, sizeof(name));
	__builtin_memcpy(tuple->name, name, sizeof(name));
}

INLINE int is_wanted(const struct wanted *wanted, const struct tuple_key *key)
{
	u8 name[16];
	if (wanted->flags & HAS_PROCESS && wanted->process != key->process)
		return 0;
	if (wanted->flags & HAS_PORT && wanted->port != key->port)
		return 0;
	if (wanted->flags & HAS_ADDRESS && !same_16(wanted->address, key->address))
		return 0;
	if (wanted->flags & HAS_NAME) {
		__builtin_memset(name, 0, sizeof(name));
		current_name(name, sizeof(name));
		if (!same_16(wanted->name, name))
			return 0;
	}
	return !(wanted->flags & HAS_CGROUP) || is_in_cgroup(wanted->cgroup);
}

INLINE u64 current_switches(void)
{
	struct task_struct *task = current_task();
	return task->nvcsw + task->nivcsw;
}

INLINE void failed_with(struct totals *totals, const struct tuple_key *key, u32 errno)
{
	struct tuple *tuple = tuple_of(totals, key);
	if (errno >= ERRNOS)
		errno = UNKNOWN;
	ADD(totals->errnos[errno], 1);
	if (!tuple)
		return;
	ADD(tuple->failed, 1);
	if (errno == EADDRNOTAVAIL)
		ADD(tuple->no_port, 1);
}

/* A number of events per window, and as many of the long ones; the counters are not exact when windows change. */
INLINE void tell(struct totals *totals, const struct tuple_key *key, u64 now, u64 ns, u16 source_port)
{
	u32 only = 0;
	struct wanted *wanted = map_lookup(&settings, &only);
	struct event *event;
	u64 window = now >> WINDOW_BITS;
	if (!wanted)
		return;
	if (totals->window != window) {
		totals->window = window;
		totals->samples_taken = 0;
		totals->outliers_taken = 0;
	}
	if (totals->samples_taken < wanted->samples_per_window)
		__sync_fetch_and_add(&totals->samples_taken, 1);
	else if (ns >= wanted->outlier_ns && totals->outliers_taken < wanted->outliers_per_window)
		__sync_fetch_and_add(&totals->outliers_taken, 1);
	else
		return;
	event = ring_reserve(&ring, sizeof(*event), 0);
	if (!event) {
		ADD(totals->lost_events, 1);
		return;
	}
	event->at_ns = now > wanted->began_ns ? now - wanted->began_ns : 0;
	event->search_ns = ns;
	__builtin_memcpy(event->address, key->address, sizeof(event->address));
	event->process = key->process;
	event->port = key->port;
	event->source_port = source_port;
	ring_submit(event, NO_WAKEUP);
}

INLINE void start(struct totals *totals, const struct sock *socket)
{
	u32 only = 0;
	struct wanted *wanted = map_lookup(&settings, &only);
	struct attempt attempt = {};
	struct call call = {};
	struct call *last;
	struct tuple *tuple;
	u64 id = (u64)socket;
	u64 task = current_task_id();
	if (!wanted)
		return;
	put_address(attempt.key.address, socket);
	attempt.key.port = __builtin_bswap16(socket->__sk_common.skc_dport);
	attempt.key.process = current_process(wanted->namespace_device, wanted->namespace_inode);
	if (!is_wanted(wanted, &attempt.key))
		return;
	last = map_lookup(&calls, &task);
	if (last && last->failed_ns) {
		/* No system call has ended since: nobody will tell the errno (io_uring). */
		ADD(totals->waiting, -1);
		failed_with(totals, &last->key, UNKNOWN);
	}
	make_tuple(&attempt.key);
	call.key = attempt.key;
	call.socket = id;
	attempt.task = task;
	attempt.switches = current_switches();
	attempt.started_ns = monotonic_ns();
	if (socket->__sk_common.skc_num) {
		attempt.ended_ns = attempt.started_ns;
		ADD(totals->given_port, 1);
		tuple = map_lookup(&tuples, &attempt.key);
		if (tuple)
			ADD(tuple->given_port, 1);
	}
	if (map_update(&calls, &task, &call, ANY) || map_update(&attempts, &id, &attempt, ANY))
		ADD(totals->lost_starts, 1);
}

INLINE void search_ended(struct attempt *attempt, u16 source_port)
{
	u64 now = monotonic_ns();
	u64 ns = now - attempt->started_ns;
	u32 parity = source_port & 1;
	u32 bucket = bucket_of(ns, COARSE_BITS);
	struct totals *totals = the_totals();
	struct tuple *tuple;
	attempt->ended_ns = now;
	if (!totals)
		return;
	count_time(parity ? &totals->times[ODD] : &totals->times[EVEN], ns);
	if (attempt->task == current_task_id() && attempt->switches != current_switches())
		ADD(totals->switched, 1);
	tuple = tuple_of(totals, &attempt->key);
	if (tuple) {
		ADD(tuple->searches[parity], 1);
		ADD(tuple->search_ns[parity], ns);
		if (bucket < COARSE)
			__sync_fetch_and_add(&tuple->buckets[parity][bucket], 1);
	}
	tell(totals, &attempt->key, now, ns, source_port);
}

/* The task that called is done with this socket. */
INLINE void forget(u64 id, u64 task)
{
	struct call *call = map_lookup(&calls, &task);
	if (call && call->socket == id && !call->failed_ns)
		map_delete(&calls, &task);
}

INLINE void established(struct totals *totals, u64 id)
{
	struct attempt *attempt = map_lookup(&attempts, &id);
	struct tuple *tuple;
	u64 task;
	if (!attempt)
		return;
	if (attempt->ended_ns)
		count_time(&totals->times[HANDSHAKE], monotonic_ns() - attempt->ended_ns);
	else
		ADD(totals->without_end, 1);
	tuple = tuple_of(totals, &attempt->key);
	if (tuple)
		ADD(tuple->established, 1);
	task = attempt->task;
	map_delete(&attempts, &id);
	forget(id, task);
}

INLINE void failed(struct totals *totals, const struct sock *socket)
{
	u64 id = (u64)socket;
	u64 task = current_task_id();
	struct attempt *attempt = map_lookup(&attempts, &id);
	struct call *call;
	u64 now, ns, owner;
	int errno = socket->sk_err;
	if (!attempt)
		return;
	now = monotonic_ns();
	ns = now - attempt->started_ns;
	owner = attempt->task;
	call = map_lookup(&calls, &task);
	if (!attempt->ended_ns && owner == task) {
		count_time(&totals->times[FAILED], ns);
		tell(totals, &attempt->key, now, ns, 0);
	}
	if (!errno && call && call->socket == id) {
		/* Its own call has done it: the errno is what that gives back. */
		call->failed_ns = ns ? ns : 1;
		ADD(totals->waiting, 1);
	} else {
		failed_with(totals, &attempt->key, errno ? (u32)errno : CLOSED_EARLY);
	}
	map_delete(&attempts, &id);
	forget(id, owner);
}

SECTION("tp_btf/inet_sock_set_state")
int set_state(u64 *context)
{
	const struct sock *socket = (const struct sock *)context[0];
	int from = (int)context[1];
	int to = (int)context[2];
	struct totals *totals;
	if (from != SYN_SENT && to != SYN_SENT)
		return 0;
	if (socket->sk_protocol != TCP)
		return 0;
	totals = the_totals();
	if (!totals)
		return 0;
	if (from == CLOSED && to == SYN_SENT)
		start(totals, socket);
	else if (from == SYN_SENT && to == ESTABLISHED)
		established(totals, (u64)socket);
	else if (from == SYN_SENT && to == CLOSED)
		failed(totals, socket);
	return 0;
}

SECTION("tp_btf/fib_table_lookup")
int route_lookup(u64 *context)
{
	const struct flowi4 *flow = (const struct flowi4 *)context[1];
	struct attempt *attempt;
	struct call *call;
	u16 source_port;
	u64 task, id;
	if (flow->__fl_common.flowic_proto != TCP)
		return 0;
	source_port = __builtin_bswap16(flow->uli.ports.sport);
	if (!source_port)
		return 0;
	task = current_task_id();
	call = map_lookup(&calls, &task);
	/* A packet that came in meanwhile is routed under the name of the same task. */
	if (!call || *(u32 *)(call->key.address + 12) != flow->daddr ||
	    call->key.port != __builtin_bswap16(flow->uli.ports.dport) ||
	    *(u32 *)(call->key.address + 8) != __builtin_bswap32(0xffff))
		return 0;
	id = call->socket;
	attempt = map_lookup(&attempts, &id);
	if (attempt && !attempt->ended_ns)
		search_ended(attempt, source_port);
	return 0;
}

SECTION("tp_btf/net_dev_queue")
int packet_queued(u64 *context)
{
	const struct sk_buff *packet = (const struct sk_buff *)context[0];
	const struct sock *socket = packet->sk;
	struct attempt *attempt;
	u64 id = (u64)socket;
	if (!socket || socket->__sk_common.skc_family != INET6 || socket->__sk_common.skc_state != SYN_SENT)
		return 0;
	attempt = map_lookup(&attempts, &id);
	if (attempt && !attempt->ended_ns)
		search_ended(attempt, socket->__sk_common.skc_num);
	return 0;
}

SECTION("tp_btf/sys_exit")
int call_ended(u64 *context)
{
	s64 result = (s64)context[1];
	struct totals *totals = the_totals();
	struct call *call;
	u64 task;
	/* All system calls of the host come by here. */
	if (!totals || !totals->waiting)
		return 0;
	task = current_task_id();
	call = map_lookup(&calls, &task);
	if (!call || !call->failed_ns)
		return 0;
	ADD(totals->waiting, -1);
	/* 0 is that of a close() in the middle of a handshake. io_uring_enter() gives a count: the errno is in the ring, where
	 * nobody looks from here. */
	failed_with(totals, &call->key,
		    !result                                     ? CLOSED_EARLY
		    : result < 0 && result > -CLOSED_EARLY ? (u32)-result
							       : UNKNOWN);
	map_delete(&calls, &task);
	return 0;
}

/* Both families search here. The socket is the second argument on every kernel; how many there are differs, and with it the
 * place of the result: what came of it the socket says. */
SECTION("fentry/__inet_hash_connect")
int search_begins(u64 *context)
{
	u64 id = context[1];
	struct attempt *attempt = map_lookup(&attempts, &id);
	if (attempt && !attempt->ended_ns)
		attempt->started_ns = monotonic_ns();
	return 0;
}

SECTION("fexit/__inet_hash_connect")
int search_returns(u64 *context)
{
	const struct sock *socket = (const struct sock *)context[1];
	u64 id = (u64)socket;
	struct attempt *attempt = map_lookup(&attempts, &id);
	if (attempt && !attempt->ended_ns && socket->__sk_common.skc_num)
		search_ended(attempt, socket->__sk_common.skc_num);
	return 0;
}

char terms[] SECTION("license") = "Dual MIT/GPL";
