/* Gives connect() of the programs of a cgroup a free source port once a destination uses much of the port range.
 *
 *   start   cgroup/connect4 and connect6, which the kernel runs right before connect() searches for a source port
 *   sample  a connect() looks up one random port of the tuple (source, destination), or 16 for a new tuple; of ranges beyond 8,191
 *           ports only one connect in a few does. The share of ports that the kernel's own search could not use is averaged by
 *           tuple.
 *   draw    past a given share: draw ports at random, look up the 4-tuple, bind the first free port with SO_REUSEADDR; then try
 *           all ports in order, from the last success on
 *   share   sockets whose port the kernel chooses get SO_REUSEADDR too, so that draws for other destinations can share the port
 *
 * Whenever the program is in doubt, connect() proceeds unchanged, and the reason is counted. The source address comes from a map
 * that user space fills with answers of the routing table, because no helper of this program type looks up a route. */
#include "kernel.h"
#include "branchless.h"

#define LAYOUT(type, size) _Static_assert(sizeof(type) == (size), "layout of " #type)

enum {
	ALLOW = 1,
	PORTS = 65536,
	ROUTES = 16384,
	NAMESPACES = 64,
	TUPLES = 8192,
	SOURCES = 64,
	RING_BYTES = 1 << 16,
	STREAM = 1,
};
/* Shares and averages have 16 bits after the point. */
enum { ONE = 1 << 16, NEW_TUPLE_SAMPLES = 16, WINDOW = 64, RANDOM_PROBES = 32, REFUSALS = 1024 };
/* A port that is being bound counts as taken for connects of the same tuple by other threads for 2^28 to 2^29 ns (268 to 537 ms):
 * between bind and the end of the search no lookup finds the socket. */
enum { CLAIM_BITS = 28 };
enum flags { DRY_RUN = 1, HAS_DESTINATION = 2, SPARES = 4 };
/* With SPARES, draws leave each fourth port to programs without a fix: the kernel's search passes over bound ports, for all destinations. */
enum { SPARED = 4 };
/* struct route.state */
enum route_state { REQUESTED = 0, KNOWN = 1, NONE = 2 };
/* SOL_SOCKET, SO_REUSEADDR; BPF_F_CURRENT_NETNS. */
enum { LEVEL_SOCKET = 1, REUSE_ADDRESS = 2 };
#define NAMESPACE_OF_SOCKET (-1ULL)

/* The same numbers are in fix_ports.rs. */
enum counter {
	CONNECTS,
	/* Reasons for which connect() proceeds unchanged. */
	LEFT_UDP,
	LEFT_PROTOCOL,
	LEFT_PORT,
	LEFT_ADDRESS,
	LEFT_DEVICE,
	LEFT_MARK,
	LEFT_RANGE,
	LEFT_DESTINATION,
	LEFT_FILTER,
	LEFT_ROUTE,
	LEFT_UNREACHABLE,
	LEFT_NAMESPACE,
	LEFT_BELOW,
	LEFT_TABLE,
	LEFT_FULL,
	/* Past the share: */
	DRAWN,
	SPREAD,
	FALLBACKS,
	WOULD_DRAW,
	/* Within draws: */
	PROBES,
	REFUSED,
	IN_ORDER,
	TIME_WAIT_USED,
	HOOK_NS,
	/* Ports that a search of the kernel would have looked at in vain: half of the range once half of it is in use. */
	AVOIDED,
	COUNTERS,
};

struct settings {
	u32 past;
	u32 flags;
	u32 sources;
	u16 port; /* 0: any */
	u16 hole;
	u32 address[4];
	u32 mask[4];
};

struct destination {
	u64 namespace;
	u32 address[4]; /* IPv4 as ::ffff:a.b.c.d */
};

struct route {
	u32 source[4];
	u32 state;
};

struct namespace {
	u16 low;
	u16 high;
	u8 time_wait; /* net.ipv4.tcp_tw_reuse */
	u8 sources;   /* the addresses of the map exist here */
	u16 hole;
	u64 reserved[PORTS / 64];
};

struct address {
	u32 words[4];
};

struct tuple_key {
	u64 namespace;
	u32 source[4];
	u32 destination[4];
	u16 port;
	u16 hole[3];
};

struct tuple {
	u64 connects;
	u64 drawn;
	u64 fallbacks;
	u32 share; /* of the ports that the kernel's own search cannot use; ONE: a search in order found none */
	u32 samples;
	u32 cursor;
	u32 looks; /* connects that asked for the share; some then use another source */
};

/* The last tuple that bound a port, and when. */
struct holder {
	u64 claim; /* see is_claimed */
	struct tuple_key key;
};

struct counters {
	u64 numbers[COUNTERS];
};

LAYOUT(struct settings, 48);
LAYOUT(struct destination, 24);
LAYOUT(struct route, 20);
LAYOUT(struct namespace, 8 + PORTS / 8);
LAYOUT(struct tuple_key, 48);
LAYOUT(struct tuple, 40);
LAYOUT(struct holder, 56);
LAYOUT(struct counters, 8 * 26);

MAP(settings, MAP_ARRAY, 1, u32, struct settings);
MAP(sources, MAP_ARRAY, SOURCES, u32, struct address);
MAP(namespaces, MAP_HASH, NAMESPACES, u64, struct namespace);
MAP(routes, MAP_HASH, ROUTES, struct destination, struct route);
MAP(tuples, MAP_HASH_FORGETFUL, TUPLES, struct tuple_key, struct tuple);
MAP(holders, MAP_ARRAY, PORTS, u32, struct holder);
MAP(counts, MAP_ARRAY_PER_CPU, 1, u32, struct counters);

/* Destinations without a route in the map. */
RING(requests, RING_BYTES);

/* As bpf_skc_lookup_tcp() takes it: the remote side is the source of the packet that would arrive. */
struct packet4 {
	u32 from;
	u32 to;
	u16 from_port;
	u16 to_port;
};

struct packet6 {
	u32 from[4];
	u32 to[4];
	u16 from_port;
	u16 to_port;
};

struct socket_address4 {
	u16 family;
	u16 port;
	u32 address;
	u32 zero[2];
};

struct socket_address6 {
	u16 family;
	u16 port;
	u32 flow;
	u32 address[4];
	u32 scope;
};

static u64 (*const current_thread)(void) = (void *)35; /* bpf_get_current_task, as a number */
static long (*const set_option)(struct bpf_sock_addr *context, int level, int option, void *value, int size) = (void *)49;
static long (*const get_option)(struct bpf_sock_addr *context, int level, int option, void *value, int size) = (void *)57;
static long (*const bind_socket)(struct bpf_sock_addr *context, void *address, int size) = (void *)64;
static void (*const release)(const struct bpf_sock *socket) = (void *)86;
static struct bpf_sock *(*const lookup_tcp)(struct bpf_sock_addr *context, void *tuple, u32 size, u64 namespace, u64 flags) =
	(void *)99;
static u64 (*const namespace_cookie)(struct bpf_sock_addr *context) = (void *)122;
static struct tcp_timewait_sock *(*const as_time_wait)(const void *socket) = (void *)138;
static long (*const loop)(u32 times, void *body, void *context, u64 flags) = (void *)181;

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct tcp_timewait_sock {
	int tw_ts_recent_stamp;
};

#pragma clang attribute pop

/* One connect() past the share. */
struct search {
	struct bpf_sock_addr *context;
	struct namespace *namespace;
	struct tuple *tuple;
	struct tuple_key key;
	u32 span;
	u32 start;
	u32 found;   /* 0: no port */
	u32 waiting; /* a port whose tuple is in TIME_WAIT and may be reused; 0: none */
	u32 probes;
	u32 refused;
	u32 takes_waiting;
	u32 last; /* the last place in order */
	u32 hash;
	u32 sources; /* additional source addresses */
	u32 least;   /* the smallest share among the sources */
	u32 best;    /* its place in the map of sources; beyond the map: the source of the route */
	struct route *route;
	u32 spares;
};

enum answer { FREE, TAKEN, WAITING };

INLINE int same_words(const u32 *one, u32 first, u32 second, u32 third, u32 fourth)
{
	return is_zero((one[0] ^ first) | (one[1] ^ second) | (one[2] ^ third) | (one[3] ^ fourth));
}

INLINE int is_ipv4(const u32 *address)
{
	return is_zero(address[0] | address[1] | (address[2] ^ __builtin_bswap32(0xffff)));
}

INLINE int is_loopback(const u32 *address)
{
	if (is_ipv4(address))
		return (address[3] & __builtin_bswap32(0xff000000)) == __builtin_bswap32(0x7f000000);
	return same_words(address, 0, 0, 0, __builtin_bswap32(1));
}

INLINE int same_address(const u32 *one, const u32 *other)
{
	return same_words(one, other[0], other[1], other[2], other[3]);
}

INLINE void copy_address(u32 *to, const u32 *from)
{
	to[0] = from[0];
	to[1] = from[1];
	to[2] = from[2];
	to[3] = from[3];
}

INLINE int same_tuple(const struct tuple_key *one, const struct tuple_key *other)
{
	return one->namespace == other->namespace && one->port == other->port && same_address(one->source, other->source) &&
	       same_address(one->destination, other->destination);
}

INLINE struct bpf_sock *socket_of(struct bpf_sock_addr *context, const struct tuple_key *key, u32 port)
{
	if (is_ipv4(key->destination)) {
		struct packet4 packet = {
			.from = key->destination[3],
			.to = key->source[3],
			.from_port = __builtin_bswap16(key->port),
			.to_port = __builtin_bswap16(port),
		};
		return lookup_tcp(context, &packet, sizeof(packet), NAMESPACE_OF_SOCKET, 0);
	} else {
		struct packet6 packet = {
			.from_port = __builtin_bswap16(key->port),
			.to_port = __builtin_bswap16(port),
		};
		copy_address(packet.from, key->destination);
		copy_address(packet.to, key->source);
		return lookup_tcp(context, &packet, sizeof(packet), NAMESPACE_OF_SOCKET, 0);
	}
}

/* Returns whether the kernel's own search would take over this TIME_WAIT socket: net.ipv4.tcp_tw_reuse allows it, the connection
 * had timestamps, and a second has passed (tcp_twsk_unique). connect() from a bound port asks for less. */
INLINE int is_reusable(const struct bpf_sock *socket, const struct namespace *namespace, const struct tuple_key *key)
{
	struct tcp_timewait_sock *waiting;
	int stamp;
	if (!namespace->time_wait || (namespace->time_wait == 2 && !is_loopback(key->destination) && !is_loopback(key->source)))
		return 0;
	waiting = as_time_wait(socket);
	if (!waiting)
		return 0;
	stamp = waiting->tw_ts_recent_stamp;
	return stamp && (u32)(monotonic_ns() / 1000000000) > (u32)stamp;
}

/* Looks up the socket of a tuple at a port. A listener at the port counts as taken, because bind() refuses the port. */
INLINE enum answer look(struct bpf_sock_addr *context, const struct namespace *namespace, const struct tuple_key *key, u32 port)
{
	struct bpf_sock *socket = socket_of(context, key, port);
	enum answer answer = TAKEN;
	if (!socket)
		return FREE;
	if (socket->state == TIME_WAIT && is_reusable(socket, namespace, key))
		answer = WAITING;
	release(socket);
	return answer;
}

/* Returns whether the kernel's own search could not use a port for the tuple: because of a socket of the tuple, or because a port
 * that was bound by number is passed over by the search of every destination (fastreuse in __inet_hash_connect). */
NOINLINE u32 is_unusable(struct bpf_sock_addr *context, struct search *search, u32 port)
{
	u32 at = port & (PORTS - 1);
	struct holder *holder;
	enum answer answer = look(context, search->namespace, &search->key, at);
	if (answer == TAKEN)
		return 1;
	holder = map_lookup(&holders, &at);
	if (!holder || holder->key.namespace != search->key.namespace)
		return 0;
	/* The search takes a TIME_WAIT socket over, unless its port was bound by number. */
	if (answer == WAITING)
		return 1;
	if (same_tuple(&holder->key, &search->key))
		return 0;
	return look(context, search->namespace, &holder->key, at) != FREE;
}

INLINE u32 random_below(u32 limit)
{
	return (u64)random_u32() * limit >> 32;
}

NOINLINE long sample(u32 index, struct search *search)
{
	struct tuple *tuple = search->tuple;
	u32 weight = tuple->samples < WINDOW ? tuple->samples + 1 : WINDOW;
	u32 port = search->namespace->low + random_below(search->span);
	if (!is_unusable(search->context, search, port))
		tuple->share -= tuple->share / weight;
	else if (tuple->share < ONE)
		/* Below ONE: samples of a nearly full range may all meet ports in use. */
		tuple->share += (ONE - 1 - tuple->share) / weight;
	tuple->samples = weight;
	return 0;
}

/* The average follows 64 samples: of a range of 32,768 ports, a share changes by less than 2% meanwhile with each eighth connect. While no
 * port is free, each connect looks whether one is free again. */
INLINE int is_due(const struct tuple *tuple, u32 span)
{
	u32 every = span >> 12;
	return every < 2 || tuple->share >= ONE || !(tuple->looks % every);
}

/* Returns the tuple with an updated share, or NULL if there is no room. */
NOINLINE struct tuple *sampled(struct search *search)
{
	struct tuple *tuple = map_lookup(&tuples, &search->key);
	if (!tuple) {
		struct tuple fresh = {};
		fresh.cursor = random_u32();
		map_update(&tuples, &search->key, &fresh, NOT_TWICE);
		tuple = map_lookup(&tuples, &search->key);
		if (!tuple)
			return NULL;
		search->tuple = tuple;
		loop(NEW_TUPLE_SAMPLES, sample, search, 0);
	} else if (is_due(tuple, search->span)) {
		search->tuple = tuple;
		sample(0, search);
	}
	tuple->looks++;
	return tuple;
}

INLINE long bind_to(struct search *search, u32 port)
{
	struct bpf_sock_addr *context = search->context;
	if (context->family == INET) {
		struct socket_address4 address = {
			.family = INET,
			.port = __builtin_bswap16(port),
			.address = search->key.source[3],
		};
		return bind_socket(context, &address, sizeof(address));
	} else {
		struct socket_address6 address = {
			.family = INET6,
			.port = __builtin_bswap16(port),
		};
		copy_address(address.address, search->key.source);
		return bind_socket(context, &address, sizeof(address));
	}
}

/* Lets later draws share the port that the kernel will choose for this socket: bind() with SO_REUSEADDR refuses the port of a
 * socket without the option. */
INLINE void let_share(struct bpf_sock_addr *context, const struct settings *wanted)
{
	int on = 1;
	if (!(wanted->flags & DRY_RUN))
		set_option(context, LEVEL_SOCKET, REUSE_ADDRESS, &on, sizeof(on));
}

/* Claims a port for this connect; fails if another thread has just done so for the same tuple. A claim has 16 bits of the time, 24 of
 * the tuple and 24 of the thread. A thread may have the address of a thread that has ended, whose connect() is over too. */
INLINE int is_claimed(struct search *search, struct holder *holder)
{
	u64 now = (monotonic_ns() >> CLAIM_BITS) & 0xffff;
	u64 tuple = search->hash & 0xffffff;
	u64 thread = (current_thread() * 0x9e3779b97f4a7c15ULL) >> 40;
	u64 before = holder->claim;
	/* An earlier connect() of the same thread is over. */
	if (((before >> 24) & 0xffffff) == tuple && (before & 0xffffff) != thread && ((now - (before >> 48)) & 0xffff) < 2)
		return 0;
	return __sync_val_compare_and_swap(&holder->claim, before, now << 48 | tuple << 24 | thread) == before;
}

/* Binds the socket if the 4-tuple is free. Returns 1 to end the loop. */
INLINE long try_port(struct search *search, u32 port)
{
	struct bpf_sock_addr *context = search->context;
	u32 at = port & (PORTS - 1);
	struct holder *holder;
	enum answer answer;
	if (search->namespace->reserved[at / 64] & 1ULL << at % 64)
		return 0;
	/* From the first port on, whose parity the kernel's search tries first. */
	if (search->spares && !((at - search->namespace->low) % SPARED))
		return 0;
	/* A socket that connects to itself. */
	if (at == search->key.port && same_address(search->key.source, search->key.destination))
		return 0;
	search->probes++;
	answer = look(context, search->namespace, &search->key, at);
	if (answer == TAKEN)
		return 0;
	if (answer == WAITING && !search->takes_waiting) {
		search->waiting = at;
		return 0;
	}
	holder = map_lookup(&holders, &at);
	if (!holder || !is_claimed(search, holder))
		return 0;
	if (bind_to(search, at))
		return ++search->refused >= REFUSALS;
	holder->key = search->key;
	search->found = at;
	return 1;
}

NOINLINE long try_random(u32 index, struct search *search)
{
	return try_port(search, search->namespace->low + random_below(search->span));
}

NOINLINE long try_next(u32 index, struct search *search)
{
	search->last = (search->start + index) % search->span;
	return try_port(search, search->namespace->low + search->last);
}

NOINLINE long try_waiting(u32 index, struct search *search)
{
	return try_port(search, search->waiting);
}

INLINE void count(struct counters *counters, u32 counter, u64 number)
{
	/* The task may be preempted, and the next one on this processor may connect too. */
	__sync_fetch_and_add(&counters->numbers[counter], number);
}

/* Returns the number of a counter: DRAWN or FALLBACKS. */
NOINLINE u32 draw(struct search *search, struct tuple *tuple, struct counters *counters)
{
	u64 began = monotonic_ns();
	int before = 0, on = 1;
	search->hash = (u32)(((u64)search->key.source[3] << 32 | search->key.destination[3]) * 0x9e3779b97f4a7c15ULL >> 32) ^
		       search->key.port * 0x9e3779b1U ^ (u32)search->key.namespace;
	get_option(search->context, LEVEL_SOCKET, REUSE_ADDRESS, &before, sizeof(before));
	if (!before)
		set_option(search->context, LEVEL_SOCKET, REUSE_ADDRESS, &on, sizeof(on));
	loop(RANDOM_PROBES, try_random, search, 0);
	if (!search->found && search->waiting) {
		search->takes_waiting = 1;
		loop(1, try_waiting, search, 0);
		if (search->found)
			count(counters, TIME_WAIT_USED, 1);
	}
	if (!search->found && search->refused < REFUSALS) {
		search->takes_waiting = 1;
		search->start = tuple->cursor % search->span;
		loop(search->span, try_next, search, 0);
		/* Also after too many refusals: the next draw continues there. */
		tuple->cursor = search->last;
		if (search->found)
			count(counters, IN_ORDER, 1);
		else if (search->refused < REFUSALS)
			/* No port of the range is free, as no sample can tell. */
			tuple->share = ONE;
	}
	if (!search->found && !before)
		set_option(search->context, LEVEL_SOCKET, REUSE_ADDRESS, &before, sizeof(before));
	count(counters, PROBES, search->probes);
	count(counters, REFUSED, search->refused);
	count(counters, HOOK_NS, monotonic_ns() - began);
	if (!search->found)
		return FALLBACKS;
	if (tuple->share >= ONE / 2)
		count(counters, AVOIDED, search->span / 2);
	return DRAWN;
}

/* Returns whether the program has set IP_LOCAL_PORT_RANGE on the socket. */
INLINE int has_own_range(struct bpf_sock_addr *context)
{
	struct tcp_sock *tcp = as_tcp_socket((void *)context->sk);
	struct inet_sock___packed *packed = (struct inet_sock___packed *)tcp;
	struct inet_sock___pair *pair = (struct inet_sock___pair *)tcp;
	if (!tcp)
		return 0;
	if (HAS_FIELD(packed->local_port_range))
		return packed->local_port_range != 0;
	if (HAS_FIELD(pair->local_port_range.lo))
		return pair->local_port_range.lo || pair->local_port_range.hi;
	return 0;
}

/* Asks user space for the source of a destination, once. */
INLINE void request(const struct destination *destination)
{
	struct route route = {};
	struct destination *event;
	if (map_update(&routes, destination, &route, NOT_TWICE))
		return;
	event = ring_reserve(&requests, sizeof(*event), 0);
	if (!event) {
		map_delete(&routes, destination);
		return;
	}
	*event = *destination;
	ring_submit(event, 0);
}

/* Chooses the source of the next attempt among the addresses of --source and the address of the route. */
INLINE int chooses_source(struct search *search, const struct settings *wanted)
{
	u32 at = random_below(wanted->sources + 1);
	struct address *address = map_lookup(&sources, &at);
	if (at >= wanted->sources || !address || is_ipv4(address->words) != is_ipv4(search->key.destination))
		return 0;
	copy_address(search->key.source, address->words);
	return 1;
}

/* Notes the source with the smallest share. */
NOINLINE long compare_source(u32 index, struct search *search)
{
	struct tuple_key key = search->key;
	u32 at = index;
	struct address *address = map_lookup(&sources, &at);
	struct tuple *tuple;
	u32 share;
	if (index >= search->sources)
		copy_address(key.source, search->route->source);
	else if (address && is_ipv4(address->words) == is_ipv4(key.destination))
		copy_address(key.source, address->words);
	else
		return 0;
	tuple = map_lookup(&tuples, &key);
	share = tuple ? tuple->share : 0;
	if (share < search->least) {
		search->least = share;
		search->best = index;
	}
	return 0;
}

/* Changes to the source with the smallest share. Returns its tuple, or NULL if every source is exhausted. */
NOINLINE struct tuple *other_source(struct search *search)
{
	struct address *address;
	u32 at;
	search->least = ONE;
	loop(search->sources + 1, compare_source, search, 0);
	if (search->least >= ONE)
		return NULL;
	at = search->best;
	address = map_lookup(&sources, &at);
	if (at >= search->sources)
		copy_address(search->key.source, search->route->source);
	else if (address)
		copy_address(search->key.source, address->words);
	search->waiting = search->takes_waiting = search->probes = search->refused = 0;
	return sampled(search);
}

NOINLINE u32 past_share(struct search *search, struct tuple *tuple, struct settings *wanted, struct counters *counters)
{
	u32 result;
	struct tuple *other;
	search->sources = wanted->sources;
	search->spares = wanted->flags & SPARES;
	if (search->namespace->sources && chooses_source(search, wanted)) {
		tuple = sampled(search);
		if (!tuple)
			return LEFT_TABLE;
		if (tuple->share <= wanted->past) {
			tuple->connects++;
			/* The kernel searches for the port; the address alone is bound (IP_BIND_ADDRESS_NO_PORT). */
			return bind_to(search, 0) ? FALLBACKS : SPREAD;
		}
	}
	if (tuple->share >= ONE && search->namespace->sources) {
		other = other_source(search);
		tuple = other ? other : tuple;
	}
	if (tuple->share >= ONE) {
		/* To look at all ports again costs more than the search of the kernel, which ends at the first port that is free again. */
		tuple->connects++;
		let_share(search->context, wanted);
		return LEFT_FULL;
	}
	result = draw(search, tuple, counters);
	if (result == FALLBACKS && search->namespace->sources) {
		other = other_source(search);
		if (other) {
			tuple = other;
			result = draw(search, tuple, counters);
		}
	}
	tuple->connects++;
	if (result == DRAWN)
		tuple->drawn++;
	else
		tuple->fallbacks++;
	return result;
}

/* Returns the counter of what became of this connect(). */
INLINE u32 decide(struct search *search, struct counters *counters)
{
	struct bpf_sock_addr *context = search->context;
	const struct bpf_sock *socket = context->sk;
	u32 only = 0;
	struct settings *wanted = map_lookup(&settings, &only);
	struct destination destination = {};
	struct route *route;
	struct tuple *tuple;
	if (!wanted || !socket)
		return LEFT_TABLE;
	if (socket->bound_dev_if)
		return LEFT_DEVICE;
	if (socket->mark)
		return LEFT_MARK;
	if (has_own_range(context))
		return LEFT_RANGE;
	if (wanted->flags & HAS_DESTINATION) {
		for (int word = 0; word < 4; word++)
			if ((search->key.destination[word] & wanted->mask[word]) != wanted->address[word])
				return LEFT_FILTER;
		if (wanted->port && wanted->port != search->key.port)
			return LEFT_FILTER;
	}
	search->key.namespace = namespace_cookie(context);
	destination.namespace = search->key.namespace;
	copy_address(destination.address, search->key.destination);
	route = map_lookup(&routes, &destination);
	if (!route) {
		request(&destination);
		let_share(context, wanted);
		return LEFT_ROUTE;
	}
	if (route->state == NONE)
		return LEFT_UNREACHABLE;
	if (route->state != KNOWN) {
		let_share(context, wanted);
		return LEFT_ROUTE;
	}
	search->route = route;
	copy_address(search->key.source, route->source);
	search->namespace = map_lookup(&namespaces, &search->key.namespace);
	if (!search->namespace || search->namespace->high < search->namespace->low)
		return LEFT_NAMESPACE;
	search->span = search->namespace->high - search->namespace->low + 1;
	tuple = sampled(search);
	if (!tuple)
		return LEFT_TABLE;
	if (tuple->share <= wanted->past) {
		tuple->connects++;
		let_share(context, wanted);
		return LEFT_BELOW;
	}
	if (wanted->flags & DRY_RUN) {
		tuple->connects++;
		if (tuple->share >= ONE / 2)
			count(counters, AVOIDED, search->span / 2);
		return WOULD_DRAW;
	}
	return past_share(search, tuple, wanted, counters);
}

INLINE struct counters *counters_here(void)
{
	u32 only = 0;
	return map_lookup(&counts, &only);
}

INLINE void finish(struct counters *counters, u32 result)
{
	count(counters, CONNECTS, 1);
	if (result < COUNTERS)
		count(counters, result, 1);
}

/* Reasons that need no search. Returns 0 if there is none. */
INLINE u32 is_left(struct bpf_sock_addr *context)
{
	const struct bpf_sock *socket = context->sk;
	if (context->protocol == UDP)
		return LEFT_UDP;
	if (context->protocol != TCP || context->type != STREAM)
		return LEFT_PROTOCOL;
	if (socket && socket->src_port)
		return LEFT_PORT;
	return 0;
}

SECTION("cgroup/connect4")
int fix_ports_ipv4(struct bpf_sock_addr *context)
{
	struct counters *counters = counters_here();
	struct search search = {};
	u32 address = context->user_ip4;
	u32 result;
	if (!counters)
		return ALLOW;
	result = is_left(context);
	if (!result && context->sk && context->sk->src_ip4)
		result = LEFT_ADDRESS;
	/* The unspecified address means this host. */
	if (!result && !address)
		result = LEFT_DESTINATION;
	if (!result) {
		search.context = context;
		search.key.destination[2] = __builtin_bswap32(0xffff);
		search.key.destination[3] = address;
		search.key.port = __builtin_bswap16(context->user_port);
		result = decide(&search, counters);
	}
	finish(counters, result);
	return ALLOW;
}

SECTION("cgroup/connect6")
int fix_ports_ipv6(struct bpf_sock_addr *context)
{
	struct counters *counters = counters_here();
	struct search search = {};
	const struct bpf_sock *socket = context->sk;
	u32 result;
	if (!counters)
		return ALLOW;
	result = is_left(context);
	if (!result && socket && (socket->src_ip6[0] || socket->src_ip6[1] || socket->src_ip6[2] || socket->src_ip6[3]))
		result = LEFT_ADDRESS;
	if (!result) {
		u32 first = context->user_ip6[0], second = context->user_ip6[1];
		u32 third = context->user_ip6[2], fourth = context->user_ip6[3];
		search.context = context;
		search.key.destination[0] = first;
		search.key.destination[1] = second;
		search.key.destination[2] = third;
		search.key.destination[3] = fourth;
		search.key.port = __builtin_bswap16(context->user_port);
		/* Unspecified, of IPv4 too; link-local addresses need a device. */
		if ((!first && !second && (!third || third == __builtin_bswap32(0xffff)) && !fourth) ||
		    (first & __builtin_bswap32(0xffc00000)) == __builtin_bswap32(0xfe800000))
			result = LEFT_DESTINATION;
		else
			result = decide(&search, counters);
	}
	finish(counters, result);
	return ALLOW;
}

char terms[] SECTION("license") = "Dual MIT/GPL";
