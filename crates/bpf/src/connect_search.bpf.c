/* Measures how long connect() of TCP searches for a source port, and how long the handshake takes after the search.
 *
 *   start   inet_sock_set_state CLOSE -> SYN_SENT, in the task that connects
 *   end     IPv4: fib_table_lookup of the same task for the same destination with a source port, because the kernel looks
 *           the route up again after the search (ip_route_newports); IPv6: net_dev_queue of the socket's SYN
 *   failure SYN_SENT -> CLOSE; the errno is sk_err or, within the call, derived from the state of the socket: see failed()
 *   peer    SYN_SENT -> ESTABLISHED
 *   close   ESTABLISHED -> FIN_WAIT1 and CLOSE_WAIT -> LAST_ACK, in the task that closes
 *
 * With fexit (a tier that not every kernel has), start and end are the entry and the return of __inet_hash_connect, which
 * is the search itself.
 *
 * A task that loses its processor during a search waits for it: this time is not part of the search.
 *
 * UDP has other hooks: connect_search_udp.h.
 *
 * The program counts everything itself; the ring carries only a sample of single searches. The work for each connection needs
 * no hash lookup: a task has an array entry while it searches, and a socket has an array entry until the end of its
 * handshake. */
#include "counting.h"

/* The same numbers and structs are in connect_search.rs. */
enum { SETS = 8192, WAYS = 8, TASKS = 16384, TUPLES = 2048, RING_BYTES = 1 << 20 };
/* Samples are taken in windows of 2^24 ns (17 ms). */
enum { WINDOW_BITS = 24 };
/* Errno of a failure: 0 unknown, 255 closed by the program during the handshake. */
enum { ERRNOS = 256, UNKNOWN = 0, CLOSED_EARLY = 255, EADDRNOTAVAIL = 99 };
enum times { EVEN, ODD, HANDSHAKE, FAILED, TIMES };
/* Flags of an attempt: its port was bound before connect(); the end of its search is not traced. */
enum { GIVEN_PORT = 1, UNTIMED = 2 };
/* The index of tuples for which the table has no room. */
enum { NOWHERE = 0xffffffff };

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
	u16 hole;
	u32 network; /* inode of the network namespace of the socket */
};

struct tuple_key {
	u8 address[16]; /* IPv4 as ::ffff:a.b.c.d */
	u32 process;
	u16 port;
	u16 hole;
};

struct tuple {
	/* The fields that each connection changes are adjacent. */
	u64 search_ns[2];
	u64 established;
	u64 closed_first;
	u64 closed_by_peer;
	u64 given_port;
	u32 to_retry; /* failures since the last connect() of the task */
	u32 namespace; /* inode of the network namespace */
	u64 failed;
	u64 no_port;
	u64 retries;
	u64 syn_retries;
	struct tuple_key key;
	u8 name[16];
	u32 buckets[2][COARSE];
};

struct totals {
	u64 lost_events;
	u64 lost_starts;
	u64 lost_tuples;
	u64 without_end; /* established connections whose end of the search was not seen */
	u64 untimed;     /* IPv6 connections from before packet_queued was attached */
	u64 unanswered;  /* connections that were only found to be established when they were closed */
	u64 lost_answers;
	u64 given_port;
	u64 switched; /* searches during which the task was not running all the time */
	u64 unmarked; /* connects without an entry in origins */
	u64 window;
	u32 samples_taken;
	u32 outliers_taken;
	u32 tuples;
	u32 ipv6_seen;
	u64 errnos[ERRNOS];
};

/* A socket in SYN_SENT, in 64 bytes so that a lookup touches one cache line. */
struct attempt {
	u64 socket; /* 0: the entry is free */
	u64 started_ns;
	u64 ended_ns; /* end of the search; 0: in progress */
	u64 switches;
	u64 delay_ns; /* of the task at the start, see run_delay() */
	u64 task;
	u32 tuple;
	u32 slot; /* entry of the task in callers */
	u32 flags;
	u32 hole;
};

/* A set of entries for sockets with the same hash of the address. */
struct set {
	struct attempt attempts[WAYS];
};

/* A task with its last connect() and its current search. */
struct caller {
	u64 task;
	u64 socket; /* 0: no search in progress */
	struct tuple_key key;
	u32 tuple;
	u32 namespace;
	/* Start of a UDP search, which has no attempt; 0 for TCP. */
	u64 started_ns;
	u64 switches;
	u64 delay_ns;
};

/* The ports of peers that a traced process has connected to. */
struct port_set {
	u64 words[1024];
};

struct event {
	u64 at_ns;
	u64 search_ns;
	u32 tuple;
	u16 source_port; /* 0: the search failed */
	u16 hole;
};

LAYOUT(struct wanted, 96);
LAYOUT(struct tuple_key, 24);
LAYOUT(struct tuple, 128 + 8 * COARSE);
LAYOUT(struct totals, 104 + 8 * ERRNOS);
LAYOUT(struct attempt, 64);
LAYOUT(struct caller, 72);
LAYOUT(struct event, 24);

MAP(settings, MAP_ARRAY, 1, u32, struct wanted);

/* Set by the tracing process after it has attached packet_queued. */
MAP(watched, MAP_ARRAY, 1, u32, u32);

MAP(sums, MAP_ARRAY, 1, u32, struct totals);

/* One per processor, so that no processor waits for another. */
MAP(times, MAP_ARRAY_PER_CPU, TIMES, u32, struct histogram);

MAP(tuples, MAP_ARRAY, TUPLES, u32, struct tuple);

/* Index in tuples by key. */
MAP(places, MAP_HASH, TUPLES, struct tuple_key, u32);

MAP(attempts, MAP_ARRAY, SETS, u32, struct set);
MAP(callers, MAP_ARRAY, TASKS, u32, struct caller);

/* The index in tuples for a socket, until the kernel frees the socket. Another process may close it: a child between fork() and exec()
 * holds copies of all sockets, and the last copy closes the connection. */
struct {
	NUMBER(type, MAP_SOCKET_STORAGE);
	NUMBER(map_flags, NO_PREALLOCATION);
	NUMBER(max_entries, 0);
	TYPE(key, int);
	TYPE(value, u32);
} origins SECTION(".maps");

MAP(ports, MAP_ARRAY, 1, u32, struct port_set);
RING(ring, RING_BYTES);

INLINE struct totals *the_totals(void)
{
	u32 only = 0;
	return map_lookup(&sums, &only);
}

/* Identifies a socket by its address, as the distance to a map at a fixed address. The verifier rejects arithmetic on the
 * address itself. */
INLINE u64 number_of(const struct sock *socket, const struct totals *totals)
{
	return (u64)socket - (u64)totals;
}

INLINE void count(u32 kind, u64 ns)
{
	struct histogram *histogram = map_lookup(&times, &kind);
	if (histogram)
		count_time(histogram, ns);
}

INLINE struct tuple *tuple_at(u32 place)
{
	return map_lookup(&tuples, &place);
}

INLINE struct tuple *tuple_of(struct totals *totals, u32 place)
{
	struct tuple *tuple = tuple_at(place);
	if (!tuple)
		ADD(totals->lost_tuples, 1);
	return tuple;
}

INLINE int same_key(const struct tuple_key *one, const struct tuple_key *other)
{
	const u64 *left = (const u64 *)one;
	const u64 *right = (const u64 *)other;
	return left[0] == right[0] && left[1] == right[1] && left[2] == right[2];
}

INLINE int is_port_known(u16 port)
{
	u32 only = 0;
	struct port_set *set = map_lookup(&ports, &only);
	return set && set->words[port >> 6 & 1023] >> (port & 63) & 1;
}

INLINE void know_port(u16 port)
{
	u32 only = 0;
	struct port_set *set = map_lookup(&ports, &only);
	if (set)
		__sync_fetch_and_or(&set->words[port >> 6 & 1023], 1ULL << (port & 63));
}

/* Called in the task that connects, because it stores the name of its process. */
INLINE u32 make_tuple(struct totals *totals, const struct tuple_key *key, u32 namespace)
{
	u32 *known = map_lookup(&places, key);
	struct tuple *tuple;
	u8 name[16];
	u32 place;
	if (known)
		return *known;
	if (totals->tuples >= TUPLES)
		return NOWHERE;
	place = __sync_fetch_and_add(&totals->tuples, 1);
	tuple = tuple_at(place);
	if (!tuple)
		return NOWHERE;
	if (map_update(&places, key, &place, NOT_TWICE)) {
		/* Another thread has added the tuple; this entry stays empty. */
		known = map_lookup(&places, key);
		return known ? *known : NOWHERE;
	}
	know_port(key->port);
	process_name(name);
	__builtin_memcpy(tuple->name, name, sizeof(name));
	tuple->namespace = namespace;
	tuple->key = *key;
	return place;
}

INLINE int is_wanted(const struct wanted *wanted, const struct tuple_key *key, u32 network)
{
	if (!is_wanted_network(wanted->flags, wanted->network, network))
		return 0;
	if (wanted->flags & HAS_PROCESS && wanted->process != key->process)
		return 0;
	if (wanted->flags & HAS_PORT && wanted->port != key->port)
		return 0;
	if (wanted->flags & HAS_ADDRESS && !same_16(wanted->address, key->address))
		return 0;
	return is_wanted_thread(wanted->flags, wanted->name, wanted->cgroup);
}

INLINE u64 current_switches(void)
{
	struct task_struct *task = current_task();
	return task->nvcsw + task->nivcsw;
}

/* Returns how long the current task has waited for a processor since it began; 0 on a kernel without CONFIG_SCHED_INFO. */
INLINE u64 run_delay(void)
{
	struct task_struct *task = current_task();
	return HAS_FIELD(task->sched_info.run_delay) ? task->sched_info.run_delay : 0;
}

/* Returns the time from `started_ns` to `now` without the wait for a processor. */
INLINE u64 ran_ns(u64 started_ns, u64 now, u64 delay_ns)
{
	u64 ns = now - started_ns;
	u64 waited = run_delay() - delay_ns;
	/* The two are read from different clocks. */
	return waited < ns ? ns - waited : 0;
}

/* A task has two possible entries; a search in progress keeps its entry. */
INLINE u32 slot_of(u64 task, int way)
{
	u32 thread = (u32)task;
	return (way ? thread * 0x9e3779b1U >> 16 : thread) % TASKS;
}

INLINE struct caller *caller_at(u32 slot)
{
	return map_lookup(&callers, &slot);
}

/* Returns the search that the current task is in. */
INLINE struct caller *searching(void)
{
	u64 task = current_task_id();
	struct caller *caller = caller_at(slot_of(task, 0));
	if (caller && caller->task == task && caller->socket)
		return caller;
	caller = caller_at(slot_of(task, 1));
	return caller && caller->task == task && caller->socket ? caller : NULL;
}

INLINE struct set *set_of(u64 socket)
{
	u32 place = (u32)((socket >> 6) * 0x9e3779b1U >> 16) % SETS;
	return map_lookup(&attempts, &place);
}

INLINE struct attempt *attempt_of(u64 socket)
{
	struct set *set = set_of(socket);
	if (!set)
		return NULL;
	for (int way = 0; way < WAYS; way++)
		if (set->attempts[way].socket == socket)
			return &set->attempts[way];
	return NULL;
}

/* Returns the entry of a socket, or takes a free entry for it. */
INLINE struct attempt *make_attempt(u64 socket)
{
	struct set *set = set_of(socket);
	struct attempt *known;
	if (!set)
		return NULL;
	/* The usual case: the first entry of the set is free. */
	if (!set->attempts[0].socket && !__sync_val_compare_and_swap(&set->attempts[0].socket, 0, socket))
		return &set->attempts[0];
	known = attempt_of(socket);
	if (known)
		return known;
	for (int way = 0; way < WAYS; way++)
		if (!set->attempts[way].socket && !__sync_val_compare_and_swap(&set->attempts[way].socket, 0, socket))
			return &set->attempts[way];
	return NULL;
}

INLINE void leave_search(const struct attempt *attempt)
{
	struct caller *caller = caller_at(attempt->slot);
	if (caller && caller->socket == attempt->socket)
		caller->socket = 0;
}

INLINE void forget(struct attempt *attempt)
{
	leave_search(attempt);
	attempt->started_ns = 0;
	attempt->socket = 0;
}

/* Sends a sample: a number of events per window, and as many long ones; the counters are not exact when windows change. */
INLINE void tell(struct totals *totals, u32 tuple, u64 now, u64 ns, u16 source_port)
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
	event->tuple = tuple;
	event->source_port = source_port;
	event->hole = 0;
	ring_submit(event, NO_WAKEUP);
}

/* `caller`: the entry for the current task, which may belong to another task. */
INLINE void put_key(struct tuple_key *key, const struct sock *socket, const struct wanted *wanted, const struct caller *caller)
{
	put_address(key->address, socket);
	key->port = __builtin_bswap16(socket->__sk_common.skc_dport);
	key->hole = 0;
	if (caller && caller->task == current_task_id())
		key->process = caller->key.process;
	else
		key->process = current_process(wanted->namespace_device, wanted->namespace_inode);
}

INLINE void start(struct totals *totals, const struct sock *socket)
{
	u32 only = 0;
	struct wanted *wanted = map_lookup(&settings, &only);
	struct tuple_key key;
	struct attempt *attempt;
	struct caller *caller;
	struct tuple *tuple;
	u64 id = number_of(socket, totals);
	u64 task = current_task_id();
	u32 namespace = socket->__sk_common.skc_net.net->ns.inum;
	u32 slot = slot_of(task, 0);
	u32 flags = 0;
	u32 *watching, *origin;
	if (!wanted)
		return;
	caller = caller_at(slot);
	put_key(&key, socket, wanted, caller);
	if (!is_wanted(wanted, &key, namespace))
		return;
	if (caller && caller->task != task && caller->socket) {
		slot = slot_of(task, 1);
		caller = caller_at(slot);
		if (caller && caller->task != task && caller->socket)
			caller = NULL;
	}
	attempt = make_attempt(id);
	if (!caller || !attempt) {
		ADD(totals->lost_starts, 1);
		return;
	}
	if (attempt->started_ns)
		ADD(totals->lost_answers, 1);
	if (caller->task != task || caller->namespace != namespace || !same_key(&caller->key, &key)) {
		caller->tuple = make_tuple(totals, &key, namespace);
		caller->namespace = namespace;
		caller->key = key;
		caller->task = task;
	}
	origin = storage_of(&origins, socket, NULL, MAKE);
	if (origin)
		*origin = caller->tuple;
	else
		ADD(totals->unmarked, 1);
	tuple = tuple_of(totals, caller->tuple);
	if (tuple && tuple->to_retry) {
		tuple->to_retry -= 1;
		ADD(tuple->retries, 1);
	}
	if (socket->__sk_common.skc_num) {
		flags = GIVEN_PORT;
		ADD(totals->given_port, 1);
		if (tuple)
			ADD(tuple->given_port, 1);
	} else if (!is_ipv4(socket)) {
		watching = map_lookup(&watched, &only);
		if (watching && !*watching) {
			flags = UNTIMED;
			totals->ipv6_seen = 1;
		}
	}
	attempt->task = task;
	attempt->tuple = caller->tuple;
	attempt->slot = slot;
	attempt->flags = flags;
	attempt->switches = current_switches();
	attempt->delay_ns = run_delay();
	attempt->ended_ns = 0;
	caller->socket = flags & GIVEN_PORT ? 0 : id;
	attempt->started_ns = monotonic_ns();
	if (flags & GIVEN_PORT)
		attempt->ended_ns = attempt->started_ns;
}

/* Counts a search that found a port. `switched`: its task was not running all the time. */
INLINE void count_search(struct totals *totals, u32 place, u64 now, u64 ns, u16 source_port, int switched)
{
	u32 parity = source_port & 1;
	u32 bucket = bucket_of(ns, COARSE_BITS);
	struct tuple *tuple;
	count(parity ? ODD : EVEN, ns);
	if (switched)
		ADD(totals->switched, 1);
	tuple = tuple_of(totals, place);
	if (tuple) {
		ADD(tuple->search_ns[parity], ns);
		if (bucket < COARSE)
			__sync_fetch_and_add(&tuple->buckets[parity][bucket], 1);
	}
	tell(totals, place, now, ns, source_port);
}

INLINE u64 search_ns(const struct attempt *attempt, u64 now)
{
	if (attempt->task == current_task_id())
		return ran_ns(attempt->started_ns, now, attempt->delay_ns);
	return now - attempt->started_ns;
}

INLINE void search_ended(struct attempt *attempt, u16 source_port)
{
	u64 now = monotonic_ns();
	u64 ns = search_ns(attempt, now);
	struct totals *totals = the_totals();
	int switched;
	attempt->ended_ns = now;
	leave_search(attempt);
	if (!totals)
		return;
	switched = attempt->task == current_task_id() && attempt->switches != current_switches();
	count_search(totals, attempt->tuple, now, ns, source_port, switched);
}

INLINE void established(struct totals *totals, struct attempt *attempt, int late)
{
	struct tuple *tuple;
	if (late)
		ADD(totals->unanswered, 1);
	else if (attempt->ended_ns)
		count(HANDSHAKE, monotonic_ns() - attempt->ended_ns);
	else if (attempt->flags & UNTIMED)
		ADD(totals->untimed, 1);
	else
		ADD(totals->without_end, 1);
	tuple = tuple_of(totals, attempt->tuple);
	if (tuple) {
		ADD(tuple->established, 1);
		/* A success ends a series of failures and retries. */
		if (tuple->to_retry)
			tuple->to_retry = 0;
	}
	forget(attempt);
}

/* Returns the errno of a failure. sk_err is set after an answer of a peer or a router, or by a timer. Without sk_err, either
 * the program has closed the socket, or connect() failed before it sent a SYN. connect() fails with EADDRNOTAVAIL if it finds
 * no port (ENOMEM if there is no memory for a bind bucket), or if the bound port is in use for this destination. Otherwise it
 * found a port but made no SYN: there is no route from that port (ip_route_newports) or no memory (tcp_connect). No hook
 * tells these two apart. */
INLINE u32 why(const struct sock *socket, const struct attempt *attempt)
{
	struct tcp_sock *tcp;
	if (socket->sk_err)
		return socket->sk_err;
	tcp = as_tcp_socket((void *)socket);
	if (!tcp)
		return UNKNOWN;
	if (tcp->packets_out)
		return CLOSED_EARLY;
	if (attempt->flags & GIVEN_PORT || !tcp->inet_conn.icsk_inet.inet_sport)
		return EADDRNOTAVAIL;
	return UNKNOWN;
}

INLINE void failed(struct totals *totals, const struct sock *socket, struct attempt *attempt)
{
	struct tuple *tuple;
	u64 now, ns;
	u32 errno = why(socket, attempt);
	if (errno >= ERRNOS)
		errno = UNKNOWN;
	if (!attempt->ended_ns && errno == EADDRNOTAVAIL) {
		now = monotonic_ns();
		ns = search_ns(attempt, now);
		count(FAILED, ns);
		tell(totals, attempt->tuple, now, ns, 0);
	}
	ADD(totals->errnos[errno], 1);
	tuple = tuple_of(totals, attempt->tuple);
	if (tuple) {
		ADD(tuple->failed, 1);
		if (errno == EADDRNOTAVAIL)
			ADD(tuple->no_port, 1);
		__sync_fetch_and_add(&tuple->to_retry, 1);
	}
	forget(attempt);
}

/* Counts an active close, which leaves the port in TIME_WAIT. A connection from before the trace counts too, if the process that
 * closes it has connected to the same destination since the trace began. */
INLINE void closing(const struct sock *socket, int from)
{
	u32 only = 0;
	struct wanted *wanted = map_lookup(&settings, &only);
	struct totals *totals = the_totals();
	struct attempt *attempt;
	struct tuple_key key;
	struct tuple *tuple;
	u32 *place;
	/* A connection that a server accepted has a peer port that no traced connect() used. */
	if (!wanted || !totals || !is_port_known(__builtin_bswap16(socket->__sk_common.skc_dport)))
		return;
	if (!is_wanted_network(wanted->flags, wanted->network, socket->__sk_common.skc_net.net->ns.inum))
		return;
	attempt = attempt_of(number_of(socket, totals));
	if (attempt)
		established(totals, attempt, 1);
	place = storage_of(&origins, socket, NULL, 0);
	if (!place) {
		put_key(&key, socket, wanted, NULL);
		place = map_lookup(&places, &key);
	}
	if (!place)
		return;
	tuple = tuple_of(totals, *place);
	if (!tuple)
		return;
	if (from == ESTABLISHED)
		ADD(tuple->closed_first, 1);
	else
		ADD(tuple->closed_by_peer, 1);
}

/* The kernel skips a program that is already running when an interrupt triggers it. So one program handles the transitions that
 * a task makes, and another one handles transitions by packets; the latter returns at once in the first case. A transition that
 * is still missed is found when the connection is closed or when its socket connects again. */
SECTION("tp_btf/inet_sock_set_state")
int called(u64 *context)
{
	const struct sock *socket = (const struct sock *)context[0];
	int from = (int)context[1];
	int to = (int)context[2];
	struct totals *totals;
	if (from == CLOSED && to == SYN_SENT) {
		totals = the_totals();
		if (totals && socket->sk_protocol == TCP)
			start(totals, socket);
	} else if ((from == ESTABLISHED && to == FIN_WAIT1) || (from == CLOSE_WAIT && to == LAST_ACK)) {
		if (socket->sk_protocol == TCP)
			closing(socket, from);
	}
	return 0;
}

SECTION("tp_btf/inet_sock_set_state")
int answered(u64 *context)
{
	const struct sock *socket = (const struct sock *)context[0];
	int to = (int)context[2];
	struct attempt *attempt;
	struct totals *totals;
	if ((int)context[1] != SYN_SENT || socket->sk_protocol != TCP)
		return 0;
	totals = the_totals();
	if (!totals)
		return 0;
	attempt = attempt_of(number_of(socket, totals));
	if (!attempt)
		return 0;
	if (to == ESTABLISHED)
		established(totals, attempt, 0);
	else if (to == CLOSED)
		failed(totals, socket, attempt);
	return 0;
}

SECTION("tp_btf/fib_table_lookup")
int route_lookup(u64 *context)
{
	const struct flowi4 *flow = (const struct flowi4 *)context[1];
	struct attempt *attempt;
	struct caller *caller;
	u16 source_port = __builtin_bswap16(flow->uli.ports.sport);
	u64 id;
	if (!source_port || flow->__fl_common.flowic_proto != TCP)
		return 0;
	caller = searching();
	/* A packet that arrives in between is routed in the context of the same task. */
	if (!caller || *(u32 *)(caller->key.address + 12) != flow->daddr ||
	    caller->key.port != __builtin_bswap16(flow->uli.ports.dport) ||
	    *(u32 *)(caller->key.address + 8) != __builtin_bswap32(0xffff))
		return 0;
	id = caller->socket;
	attempt = attempt_of(id);
	if (attempt && !attempt->ended_ns)
		search_ended(attempt, source_port);
	return 0;
}

/* Runs for every packet of the host, so it is attached only after the first connect over IPv6. */
SECTION("tp_btf/net_dev_queue")
int packet_queued(u64 *context)
{
	const struct sk_buff *packet = (const struct sk_buff *)context[0];
	const struct sock *socket = packet->sk;
	struct totals *totals;
	struct attempt *attempt;
	u64 id;
	if (!socket || socket->__sk_common.skc_family != INET6 || socket->__sk_common.skc_state != SYN_SENT)
		return 0;
	totals = the_totals();
	if (!totals)
		return 0;
	id = number_of(socket, totals);
	attempt = attempt_of(id);
	if (attempt && !attempt->ended_ns && !(attempt->flags & UNTIMED))
		search_ended(attempt, socket->__sk_common.skc_num);
	return 0;
}

SECTION("tp_btf/tcp_retransmit_skb")
int sent_again(u64 *context)
{
	const struct sock *socket = (const struct sock *)context[0];
	struct totals *totals = the_totals();
	struct attempt *attempt;
	struct tuple *tuple;
	if (!totals || socket->__sk_common.skc_state != SYN_SENT)
		return 0;
	attempt = attempt_of(number_of(socket, totals));
	if (!attempt)
		return 0;
	tuple = tuple_at(attempt->tuple);
	if (tuple)
		ADD(tuple->syn_retries, 1);
	return 0;
}

/* Both families search here. The socket is the second argument on every kernel, but the number of arguments differs, and with
 * it the position of the return value. So the program takes the result from the socket. */
SECTION("fentry/__inet_hash_connect")
int search_begins(u64 *context)
{
	const struct sock *socket = (const struct sock *)context[1];
	struct totals *totals = the_totals();
	struct attempt *attempt;
	if (!totals)
		return 0;
	attempt = attempt_of(number_of(socket, totals));
	if (attempt && !attempt->ended_ns) {
		attempt->delay_ns = run_delay();
		attempt->started_ns = monotonic_ns();
	}
	return 0;
}

SECTION("fexit/__inet_hash_connect")
int search_returns(u64 *context)
{
	const struct sock *socket = (const struct sock *)context[1];
	struct totals *totals = the_totals();
	struct attempt *attempt;
	if (!totals)
		return 0;
	attempt = attempt_of(number_of(socket, totals));
	if (attempt && !attempt->ended_ns && socket->__sk_common.skc_num)
		search_ended(attempt, socket->__sk_common.skc_num);
	return 0;
}

#include "connect_search_udp.h"

char terms[] SECTION("license") = "Dual MIT/GPL";
