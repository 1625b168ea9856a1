/* The common part of the counting programs: histograms, and the ids of sockets and processes. Its counterpart is
 * tracing.rs. */
#pragma once
#include "kernel.h"

#define LAYOUT(type, size) _Static_assert(sizeof(type) == (size), "layout of " #type)

/* Log-linear histograms up to 2^36 ns (69 s), with the binary logarithm of the number of steps per octave. */
enum { OCTAVES = 36, FINE_BITS = 5, COARSE_BITS = 3 };
enum { FINE = (OCTAVES - FINE_BITS + 1) << FINE_BITS, COARSE = (OCTAVES - COARSE_BITS + 1) << COARSE_BITS };
struct histogram {
	u64 count;
	u64 sum_ns;
	u64 max_ns;
	u64 buckets[FINE];
};
LAYOUT(struct histogram, 24 + 8 * FINE);

#define ADD(place, number) ((void)__sync_fetch_and_add(&(place), (number)))

/* Returns the position of the highest bit of a value that is not 0. */
INLINE u32 highest_bit(u64 value)
{
	u32 bit = 0;
	if (value >> 32) {
		bit += 32;
		value >>= 32;
	}
	if (value >> 16) {
		bit += 16;
		value >>= 16;
	}
	if (value >> 8) {
		bit += 8;
		value >>= 8;
	}
	if (value >> 4) {
		bit += 4;
		value >>= 4;
	}
	if (value >> 2) {
		bit += 2;
		value >>= 2;
	}
	return bit + (u32)(value >> 1);
}

/* Returns the bucket of a time, with the same layout as LogLinear of fourtuple-record. */
INLINE u32 bucket_of(u64 ns, u32 bits)
{
	u32 octave;
	if (ns >> OCTAVES)
		ns = (1ULL << OCTAVES) - 1;
	if (ns < (1ULL << bits))
		return ns;
	octave = highest_bit(ns) - bits;
	return ((octave + 1) << bits) + ((u32)(ns >> octave) & ((1U << bits) - 1));
}

INLINE void count_time(struct histogram *histogram, u64 ns)
{
	u32 bucket = bucket_of(ns, FINE_BITS);
	ADD(histogram->count, 1);
	ADD(histogram->sum_ns, ns);
	for (int tries = 0; tries < 4; tries++) {
		u64 longest = histogram->max_ns;
		if (ns <= longest || __sync_val_compare_and_swap(&histogram->max_ns, longest, ns) == longest)
			break;
	}
	if (bucket < FINE)
		ADD(histogram->buckets[bucket], 1);
}

INLINE int is_ipv4(const struct sock *socket)
{
	return socket->__sk_common.skc_family == INET ||
	       (socket->__sk_common.skc_v6_daddr.in6_u.u6_addr32[0] == 0 &&
		socket->__sk_common.skc_v6_daddr.in6_u.u6_addr32[1] == 0 &&
		socket->__sk_common.skc_v6_daddr.in6_u.u6_addr32[2] == __builtin_bswap32(0xffff));
}

/* Stores the address of the peer in 16 bytes, aligned to 4, IPv4 as ::ffff:a.b.c.d. */
INLINE void put_address(u8 *address, const struct sock *socket)
{
	u32 *words = (u32 *)address;
	if (is_ipv4(socket)) {
		words[0] = 0;
		words[1] = 0;
		words[2] = __builtin_bswap32(0xffff);
		words[3] = socket->__sk_common.skc_daddr;
	} else {
		words[0] = socket->__sk_common.skc_v6_daddr.in6_u.u6_addr32[0];
		words[1] = socket->__sk_common.skc_v6_daddr.in6_u.u6_addr32[1];
		words[2] = socket->__sk_common.skc_v6_daddr.in6_u.u6_addr32[2];
		words[3] = socket->__sk_common.skc_v6_daddr.in6_u.u6_addr32[3];
	}
}

INLINE int same_16(const u8 *one, const u8 *other)
{
	for (int at = 0; at < 16; at++)
		if (one[at] != other[at])
			return 0;
	return 1;
}

/* Returns whether the current task is in this cgroup or below it. */
INLINE int is_in_cgroup(u64 cgroup)
{
	for (int level = 0; level < 16; level++) {
		u64 ancestor = current_ancestor_cgroup(level);
		if (ancestor == cgroup)
			return 1;
		if (!ancestor)
			return 0;
	}
	return 0;
}

/* Flags for the fields of a program's settings that are set; the same numbers are in filter.rs. */
enum flags { HAS_PROCESS = 1, HAS_NAME = 2, HAS_ADDRESS = 4, HAS_PORT = 8, HAS_CGROUP = 16, HAS_NETWORK = 32 };

/* Stores the name of the current process, which is that of its first thread. Runtimes name their other threads, as wrk:worker_0 of Envoy. */
INLINE void process_name(u8 *name)
{
	const struct task_struct *task = current_task(), *leader = NULL;
	__builtin_memset(name, 0, 16);
	if (!read_kernel(&leader, sizeof(leader), &task->group_leader) && leader)
		read_kernel(name, 16, leader->comm);
}

/* Returns whether the current thread or its process has a name. */
NOINLINE int has_name(const u8 *wanted)
{
	u8 name[16] = {};
	current_name(name, sizeof(name));
	if (same_16(wanted, name))
		return 1;
	process_name(name);
	return same_16(wanted, name);
}

INLINE int is_wanted_thread(u32 flags, const u8 *wanted_name, u64 cgroup)
{
	if (flags & HAS_NAME && !has_name(wanted_name))
		return 0;
	return !(flags & HAS_CGROUP) || is_in_cgroup(cgroup);
}

/* Returns whether an object of this network namespace is wanted: its inode. */
INLINE int is_wanted_network(u32 flags, u32 wanted, u32 network)
{
	return !(flags & HAS_NETWORK) || wanted == network;
}

/* Returns the inode of the network namespace of the current task. */
INLINE u32 current_network(void)
{
	return current_task()->nsproxy->net_ns->ns.inum;
}

/* Returns the process id in the PID namespace of the tracing process, or in the initial one if the task is not in there. */
INLINE u32 current_process(u64 namespace_device, u64 namespace_inode)
{
	struct ids_in_namespace ids = {};
	if (!current_ids_in_namespace(namespace_device, namespace_inode, &ids, sizeof(ids)))
		return ids.process;
	return current_task_id() >> 32;
}
