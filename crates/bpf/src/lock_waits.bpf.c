/* Traces which spinlocks of the kernel tasks wait for and from where, and which tasks sleep in lock_sock() until the socket has
 * no owner.
 *
 *   spin    lock:contention_begin -> contention_end (since Linux 5.19)
 *   sleep   sched_switch away from a task that is uninterruptible in __lock_sock -> sched_switch to it
 *
 * A wait is identified by the kernel's stack, from which the tracing process derives the kind of lock. Expensive work is done
 * at the beginning of a wait only, because at the end the lock is held. */
#include "counting.h"

/* The same numbers and structs are in lock_waits.rs. */
enum { LOCKS = 16384, PATHS = 4096, FRAMES = 96, SLEEPERS = 4096 };
/* A task, a softirq, a hardirq and an NMI may wait on one processor at a time. */
enum { NESTED = 4 };
/* The maximum number of frames from sched_switch up to __lock_sock, including the frames of the tracing itself. */
enum { NEAR = 12 };
/* Flags of include/trace/events/lock.h; a queued spinlock has no flag. */
enum contention { SPIN = 1, MUTEX = 32 };
enum { UNINTERRUPTIBLE = 2 };
/* The path of waits whose stack is not known. No stack has this hash. */
enum { NO_PATH = 0 };
/* The error of a map update: the map is full. */
enum { FULL = -7 };

/* The filter of tasks; unset fields match every task. */
struct wanted {
	u64 cgroup;
	u64 namespace_device;
	u64 namespace_inode;
	/* Start and end address of __lock_sock; 0: sleeps are not traced. */
	u64 sleep_from;
	u64 sleep_to;
	u32 flags;
	u32 process;
	u8 name[16];
	u32 network; /* inode of a network namespace */
	u32 hole;
};

struct wait_key {
	u64 lock; /* address of the lock; 0: a sleep, whose lock is not known */
	u64 path; /* hash of the stack */
};

struct wait {
	u64 waits;
	u64 wait_ns;
	u64 max_ns;
	u32 mix; /* hash_mix of the network namespace of the task */
	u32 hole;
};

/* A stack, and the waits on it by time. The key is a 64-bit hash: two of 4,096 stacks share one with a probability of 5e-13.
 * The kernel's map type for stacks (BPF_MAP_TYPE_STACK_TRACE) has one slot for each hash and refuses a second stack in the same
 * slot, so it loses stacks long before it is full. */
struct path {
	u64 depth; /* number of valid frames */
	u64 frames[FRAMES]; /* return addresses, the innermost first */
	u32 buckets[COARSE];
};

/* A buffer per processor for a stack trace, which is too long for the stack of a BPF program. */
struct scratch {
	u64 in_use;
	struct path path;
};

/* TCP's hash tables. */
struct tables {
	u64 bhash;
	u64 bhash2;
	u64 ehash_locks;
	u64 lhash2;
	u32 bhash_size;
	u32 ehash_locks_mask;
	u32 lhash2_mask;
	u32 bucket_bytes;
	u32 lock_bytes;
	u32 listen_bytes;
};

struct totals {
	u64 lost_waits;  /* waits without room for the lock or the sleeper */
	u64 lost_paths;  /* waits counted without a path, because the map of paths was full */
	u64 lost_stacks; /* waits counted without a path, because the stack could not be read */
	u64 lost_busy;   /* waits lost because this processor was changing the map */
	u64 lost_nested; /* waits lost because more than NESTED were recorded at a time */
	u64 asleep;
	u64 opened;
	u64 accepted;
	u64 closed; /* by tasks that the filter selects */
	struct tables tables;
};

struct waiting {
	u64 lock;
	u64 started_ns;
	struct wait_key key;
};

struct processor {
	struct waiting waiting[NESTED];
};

struct sleeper {
	u64 started_ns;
	struct wait_key key;
};

LAYOUT(struct wanted, 72);
LAYOUT(struct wait_key, 16);
LAYOUT(struct wait, 32);
LAYOUT(struct path, 8 + 8 * FRAMES + 4 * COARSE);
LAYOUT(struct tables, 56);
LAYOUT(struct totals, 128);

MAP(settings, MAP_ARRAY, 1, u32, struct wanted);
MAP(sums, MAP_ARRAY, 1, u32, struct totals);
MAP(scratches, MAP_ARRAY_PER_CPU, 1, u32, struct scratch);
MAP(processors, MAP_ARRAY_PER_CPU, 1, u32, struct processor);
MAP(waits, MAP_HASH, LOCKS, struct wait_key, struct wait);
MAP(paths, MAP_HASH, PATHS, u64, struct path);
MAP(sleepers, MAP_HASH, SLEEPERS, u64, struct sleeper);

INLINE struct totals *the_totals(void)
{
	u32 only = 0;
	return map_lookup(&sums, &only);
}

INLINE struct wanted *the_wanted(void)
{
	u32 only = 0;
	return map_lookup(&settings, &only);
}

INLINE int is_wanted(const struct wanted *wanted)
{
	if (wanted->flags & HAS_PROCESS &&
	    wanted->process != current_process(wanted->namespace_device, wanted->namespace_inode))
		return 0;
	/* A lock has no network namespace. */
	if (!is_wanted_network(wanted->flags, wanted->network, current_network()))
		return 0;
	return is_wanted_thread(wanted->flags, wanted->name, wanted->cgroup);
}

/* Reads the stack into `path`, whose histogram stays empty. Returns its hash, or NO_PATH. */
INLINE u64 read_stack(void *context, struct path *path)
{
	u64 hash = 0;
	long bytes = copy_stack(context, path->frames, sizeof(path->frames), 0);
	if (bytes <= 0)
		return NO_PATH;
	path->depth = (u64)bytes / sizeof(u64);
	for (u32 at = 0; at < FRAMES && at < path->depth; at++) {
		hash = (hash ^ path->frames[at]) * 0x9e3779b97f4a7c15ULL;
		hash ^= hash >> 32;
	}
	return hash == NO_PATH ? 1 : hash;
}

/* Returns the path of the current task after adding it to the map, or NO_PATH, which is counted, if that fails. */
INLINE u64 find_path(struct totals *totals, void *context)
{
	u32 only = 0;
	u64 hash;
	long error;
	struct scratch *scratch = map_lookup(&scratches, &only);
	/* An interrupt may run a program while the interrupted program is here: since Linux 6.1 only another program of this object,
	 * on older kernels also the same one. */
	if (!scratch || scratch->in_use) {
		ADD(totals->lost_stacks, 1);
		return NO_PATH;
	}
	scratch->in_use = 1;
	hash = read_stack(context, &scratch->path);
	if (hash == NO_PATH) {
		ADD(totals->lost_stacks, 1);
	} else if (!map_lookup(&paths, &hash)) {
		error = map_update(&paths, &hash, &scratch->path, NOT_TWICE);
		/* Another processor may have added the entry first. */
		if (error && !map_lookup(&paths, &hash)) {
			if (error == FULL)
				ADD(totals->lost_paths, 1);
			else
				ADD(totals->lost_stacks, 1);
			hash = NO_PATH;
		}
	}
	scratch->in_use = 0;
	return hash;
}

/* Adds the entry for a wait of the current task before it is counted. Returns false if the map is full. */
INLINE int prepare(struct totals *totals, void *context, struct wait_key *key)
{
	struct wait wait = {};
	long error;
	key->path = find_path(totals, context);
	if (map_lookup(&waits, key))
		return 1;
	wait.mix = current_task()->nsproxy->net_ns->hash_mix;
	error = map_update(&waits, key, &wait, NOT_TWICE);
	if (!error || map_lookup(&waits, key))
		return 1;
	if (error == FULL)
		ADD(totals->lost_waits, 1);
	else
		ADD(totals->lost_busy, 1);
	return 0;
}

INLINE void count_wait(const struct wait_key *key, u64 ns)
{
	struct wait *wait = map_lookup(&waits, key);
	struct path *path = map_lookup(&paths, &key->path);
	u32 bucket = bucket_of(ns, COARSE_BITS);
	if (!wait)
		return;
	ADD(wait->waits, 1);
	ADD(wait->wait_ns, ns);
	for (int tries = 0; tries < 4; tries++) {
		u64 longest = wait->max_ns;
		if (ns <= longest || __sync_val_compare_and_swap(&wait->max_ns, longest, ns) == longest)
			break;
	}
	if (path && bucket < COARSE)
		__sync_fetch_and_add(&path->buckets[bucket], 1);
}

SECTION("tp_btf/contention_begin")
int spin_begins(u64 *context)
{
	u64 lock = context[0];
	u32 flags = (u32)context[1];
	u32 only = 0;
	struct totals *totals = the_totals();
	struct wanted *wanted = the_wanted();
	struct processor *processor;
	struct waiting *place = NULL;
	struct wait_key key = {};
	if (flags && (!(flags & SPIN) || flags & MUTEX))
		return 0;
	processor = map_lookup(&processors, &only);
	if (!totals || !wanted || !processor || !is_wanted(wanted))
		return 0;
	/* Interrupts nest: a wait in an interrupt that takes the same entry has released it when this program continues. */
#pragma unroll
	for (int at = 0; at < NESTED; at++)
		if (!place && (!processor->waiting[at].lock || processor->waiting[at].lock == lock))
			place = &processor->waiting[at];
	if (!place) {
		/* The end of a wait was missed because another wait was being counted; the oldest wait is dropped. */
		place = &processor->waiting[0];
		ADD(totals->lost_nested, 1);
	}
	key.lock = lock;
	if (!prepare(totals, context, &key))
		return 0;
	place->key = key;
	place->started_ns = monotonic_ns();
	place->lock = lock;
	return 0;
}

SECTION("tp_btf/contention_end")
int spin_ends(u64 *context)
{
	u64 lock = context[0];
	u32 only = 0;
	struct processor *processor = map_lookup(&processors, &only);
	struct wait_key key;
	u64 ns;
	if (!processor || !lock)
		return 0;
#pragma unroll
	for (int at = 0; at < NESTED; at++) {
		struct waiting *waiting = &processor->waiting[at];
		if (waiting->lock != lock)
			continue;
		ns = monotonic_ns() - waiting->started_ns;
		key = waiting->key;
		waiting->lock = 0;
		count_wait(&key, ns);
		return 0;
	}
	return 0;
}

/* Returns whether the task waits until the owner of a socket releases it. */
INLINE int is_in_lock_sock(void *context, const struct wanted *wanted)
{
	u64 frames[NEAR] = {};
	copy_stack(context, frames, sizeof(frames), 0);
#pragma unroll
	for (int at = 0; at < NEAR; at++)
		if (frames[at] >= wanted->sleep_from && frames[at] < wanted->sleep_to)
			return 1;
	return 0;
}

INLINE void falls_asleep(struct totals *totals, void *context, u64 task)
{
	struct wanted *wanted = the_wanted();
	struct sleeper sleeper = {};
	long error;
	if (!wanted || !is_wanted(wanted) || !is_in_lock_sock(context, wanted))
		return;
	if (!prepare(totals, context, &sleeper.key))
		return;
	sleeper.started_ns = monotonic_ns();
	error = map_update(&sleepers, &task, &sleeper, ANY);
	if (!error)
		ADD(totals->asleep, 1);
	else if (error == FULL)
		ADD(totals->lost_waits, 1);
	else
		ADD(totals->lost_busy, 1);
}

INLINE void wakes_up(struct totals *totals, u64 task)
{
	struct sleeper *sleeper = map_lookup(&sleepers, &task);
	struct wait_key key;
	if (!sleeper)
		return;
	key = sleeper->key;
	count_wait(&key, monotonic_ns() - sleeper->started_ns);
	map_delete(&sleepers, &task);
	ADD(totals->asleep, -1);
}

SECTION("tp_btf/sched_switch")
int task_switched(u64 *context)
{
	int preempted = context[0] & 1;
	const struct task_struct *from = (const struct task_struct *)context[1];
	struct totals *totals = the_totals();
	if (!totals)
		return 0;
	/* Runs for every context switch of the host. */
	if (!preempted && from->__state == UNINTERRUPTIBLE)
		falls_asleep(totals, context, (u64)from);
	if (totals->asleep)
		wakes_up(totals, context[2]);
	return 0;
}

/* Reads the addresses of TCP's tables. All network namespaces share them, but a namespace may have its own connection table. */
INLINE void find_tables(struct tables *tables, const struct sock *socket)
{
	const struct net *net = socket->__sk_common.skc_net.net;
	const struct inet_hashinfo *info;
	/* In Linux 5.19 and 6.0 tcp_death_row is a pointer. */
	if (!HAS_FIELD(net->ipv4.tcp_death_row.hashinfo))
		return;
	info = net->ipv4.tcp_death_row.hashinfo;
	tables->bhash_size = info->bhash_size;
	tables->bucket_bytes = KERNEL_SIZE(struct inet_bind_hashbucket);
	tables->ehash_locks_mask = info->ehash_locks_mask;
	tables->ehash_locks = (u64)info->ehash_locks;
	tables->lock_bytes = KERNEL_SIZE(struct spinlock);
	tables->lhash2_mask = info->lhash2_mask;
	tables->lhash2 = (u64)info->lhash2;
	tables->listen_bytes = KERNEL_SIZE(struct inet_listen_hashbucket);
	if (HAS_FIELD(info->bhash2))
		tables->bhash2 = (u64)info->bhash2;
	tables->bhash = (u64)info->bhash;
}

SECTION("tp_btf/inet_sock_set_state")
int set_state(u64 *context)
{
	const struct sock *socket = (const struct sock *)context[0];
	int from = (int)context[1];
	int to = (int)context[2];
	struct totals *totals = the_totals();
	struct wanted *wanted = the_wanted();
	if (!totals || !wanted || socket->sk_protocol != TCP)
		return 0;
	if (!totals->tables.bhash)
		find_tables(&totals->tables, socket);
	if (!is_wanted_network(wanted->flags, wanted->network, socket->__sk_common.skc_net.net->ns.inum))
		return 0;
	if (!(wanted->flags & ~HAS_NETWORK)) {
		if (from == SYN_SENT && to == ESTABLISHED)
			ADD(totals->opened, 1);
		else if (from == SYN_RECV && to == ESTABLISHED)
			ADD(totals->accepted, 1);
		return 0;
	}
	/* A handshake ends in any task that a packet interrupts, but connect() and close() run in the selected tasks. */
	if (from == CLOSED && to == SYN_SENT) {
		if (is_wanted(wanted))
			ADD(totals->opened, 1);
	} else if ((from == ESTABLISHED && to == FIN_WAIT1) || (from == CLOSE_WAIT && to == LAST_ACK)) {
		if (is_wanted(wanted))
			ADD(totals->closed, 1);
	}
	return 0;
}

char terms[] SECTION("license") = "Dual MIT/GPL";
