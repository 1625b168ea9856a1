/* Measures how long connect() of UDP searches for a source port.
 *
 *   start   cgroup/connect4 and connect6, which inet_dgram_connect() runs right before inet_autobind(), the search
 *   end     fib_table_lookup (IPv6: fib6_table_lookup) of the same task for the same destination with a source port, because
 *           the kernel looks up the route after the search (__ip4_datagram_connect, ip6_datagram_dst_update)
 *   failure a search without an end. The kernel has one errno for it: EAGAIN. It is known when the task connects again.
 *
 * The cgroup programs allow every call. A UDP search has no attempt: its state is in the entry of its task.
 * This file is a part of connect_search.bpf.c and uses its maps. */
#pragma once

enum { EAGAIN = 11, ALLOW = 1 };

/* Returns the same id as current_process(), whose helpers cgroup programs may not call before Linux 6.10. */
INLINE u32 process_from_leader(const struct wanted *wanted)
{
	struct task_struct *task = current_task();
	struct pid *pid = NULL;
	const struct upid *innermost;
	unsigned int level = 0;
	struct pid_namespace *namespace = NULL;
	u32 inode = 0;
	int number = 0;
	/* The pointer is read as a number, on which the verifier of 6.1 allows arithmetic. */
	if (read_kernel(&pid, sizeof(pid), &task->group_leader->thread_pid) || !pid ||
	    read_kernel(&level, sizeof(level), &pid->level))
		return current_task_id() >> 32;
	innermost = (const struct upid *)((u64)&pid->numbers + (u64)(level & 31) * KERNEL_SIZE(struct upid));
	if (!read_kernel(&namespace, sizeof(namespace), &innermost->ns) && namespace &&
	    !read_kernel(&inode, sizeof(inode), &namespace->ns.inum) && inode == wanted->namespace_inode &&
	    !read_kernel(&number, sizeof(number), &innermost->nr))
		return number;
	return current_task_id() >> 32;
}

INLINE u32 namespace_of(struct caller *caller, const struct bpf_sock *shown)
{
	volatile u64 *place = &caller->started_ns;
	const struct sock *socket;
	struct net *net = NULL;
	u32 inode = 0;
	/* The context points to the socket itself. The verifier rejects arithmetic on a pointer of this type, but a value read
	 * from a map is a number. */
	*place = (u64)shown;
	socket = (const struct sock *)*place;
	if (read_kernel(&net, sizeof(net), &socket->__sk_common.skc_net.net) || !net)
		return 0;
	read_kernel(&inode, sizeof(inode), &net->ns.inum);
	return inode;
}

INLINE void count_failure(struct totals *totals, u32 place, u32 errno)
{
	struct tuple *tuple = tuple_of(totals, place);
	ADD(totals->errnos[errno & (ERRNOS - 1)], 1);
	if (!tuple)
		return;
	ADD(tuple->failed, 1);
	if (errno == EAGAIN)
		ADD(tuple->no_port, 1);
	__sync_fetch_and_add(&tuple->to_retry, 1);
}

/* Returns the task's own entry, or a free entry, or the entry of another task whose search ended unseen long ago. */
INLINE struct caller *place_for(struct totals *totals, u64 task)
{
	struct caller *first = caller_at(slot_of(task, 0));
	struct caller *second = caller_at(slot_of(task, 1));
	if (!first || !second)
		return NULL;
	if (first->task == task)
		return first;
	if (second->task == task)
		return second;
	if (!first->socket)
		return first;
	if (second->socket) {
		second->socket = 0;
		count_failure(totals, second->tuple, UNKNOWN);
	}
	return second;
}

/* Records the start of a search. The caller has set address and port of `key`. */
INLINE void udp_connects(struct bpf_sock_addr *context, struct tuple_key *key)
{
	u32 only = 0;
	struct wanted *wanted = map_lookup(&settings, &only);
	struct totals *totals = the_totals();
	const struct bpf_sock *socket = context->sk;
	u64 task = current_task_id();
	struct caller *caller;
	struct tuple *tuple;
	u32 namespace, port;
	u64 cookie;
	if (!wanted || !totals || !socket)
		return;
	port = socket->src_port;
	cookie = socket_cookie(context);
	caller = place_for(totals, task);
	if (!caller)
		return;
	if (caller->task == task && caller->socket) {
		/* The end of the previous search was not seen. If the socket is the same and has a port, that search found a port. */
		if (caller->socket == cookie && port)
			ADD(totals->lost_answers, 1);
		else
			count_failure(totals, caller->tuple, EAGAIN);
		caller->socket = 0;
	}
	key->process = caller->task == task ? caller->key.process : process_from_leader(wanted);
	namespace = namespace_of(caller, socket);
	if (!is_wanted(wanted, key, namespace))
		return;
	if (caller->task != task || caller->namespace != namespace || !same_key(&caller->key, key)) {
		caller->tuple = make_tuple(totals, key, namespace);
		caller->namespace = namespace;
		caller->key = *key;
		caller->task = task;
	}
	tuple = tuple_of(totals, caller->tuple);
	if (tuple && tuple->to_retry) {
		tuple->to_retry -= 1;
		ADD(tuple->retries, 1);
	}
	if (port) {
		ADD(totals->given_port, 1);
		if (tuple)
			ADD(tuple->given_port, 1);
		return;
	}
	caller->switches = current_switches();
	caller->delay_ns = run_delay();
	caller->socket = cookie;
	caller->started_ns = monotonic_ns();
}

INLINE void udp_search_ended(struct caller *caller, u16 source_port)
{
	u64 now = monotonic_ns();
	u64 ns = ran_ns(caller->started_ns, now, caller->delay_ns);
	struct totals *totals = the_totals();
	struct tuple *tuple = tuple_at(caller->tuple);
	caller->socket = 0;
	if (!totals)
		return;
	count_search(totals, caller->tuple, now, ns, source_port, caller->switches != current_switches());
	/* A success ends a series of failures and retries. */
	if (tuple && tuple->to_retry)
		tuple->to_retry = 0;
}

SECTION("cgroup/connect4")
int udp_connects_ipv4(struct bpf_sock_addr *context)
{
	struct tuple_key key = {};
	u32 *words = (u32 *)key.address;
	u32 address = context->user_ip4;
	if (context->protocol != UDP)
		return ALLOW;
	/* connect() to a multicast or broadcast address looks up no route, so no hook would see the end of the search. */
	if (__builtin_bswap32(address) >> 28 >= 14)
		return ALLOW;
	words[2] = __builtin_bswap32(0xffff);
	/* The unspecified address means this host. */
	words[3] = address ? address : __builtin_bswap32(0x7f000001);
	key.port = __builtin_bswap16(context->user_port);
	udp_connects(context, &key);
	return ALLOW;
}

SECTION("cgroup/connect6")
int udp_connects_ipv6(struct bpf_sock_addr *context)
{
	struct tuple_key key = {};
	u32 *words = (u32 *)key.address;
	if (context->protocol != UDP)
		return ALLOW;
	words[0] = context->user_ip6[0];
	words[1] = context->user_ip6[1];
	words[2] = context->user_ip6[2];
	words[3] = context->user_ip6[3];
	if (!words[0] && !words[1] && words[2] == __builtin_bswap32(0xffff) && __builtin_bswap32(words[3]) >> 28 >= 14)
		return ALLOW;
	if (!words[0] && !words[1] && !words[2] && !words[3])
		words[3] = __builtin_bswap32(1);
	key.port = __builtin_bswap16(context->user_port);
	udp_connects(context, &key);
	return ALLOW;
}

SECTION("tp_btf/fib_table_lookup")
int udp_route_lookup(u64 *context)
{
	const struct flowi4 *flow = (const struct flowi4 *)context[1];
	struct caller *caller;
	const u32 *words;
	u16 source_port = __builtin_bswap16(flow->uli.ports.sport);
	if (!source_port || flow->__fl_common.flowic_proto != UDP)
		return 0;
	caller = searching();
	if (!caller || caller->key.port != __builtin_bswap16(flow->uli.ports.dport))
		return 0;
	words = (const u32 *)caller->key.address;
	/* A packet that arrives in between is routed in the context of the same task. */
	if (words[3] != flow->daddr || words[2] != __builtin_bswap32(0xffff) || words[1] || words[0])
		return 0;
	udp_search_ended(caller, source_port);
	return 0;
}

SECTION("tp_btf/fib6_table_lookup")
int udp_route_lookup_ipv6(u64 *context)
{
	const struct flowi6 *flow = (const struct flowi6 *)context[3];
	struct caller *caller;
	const u32 *words;
	u16 source_port = __builtin_bswap16(flow->uli.ports.sport);
	if (!source_port || flow->__fl_common.flowic_proto != UDP)
		return 0;
	caller = searching();
	if (!caller || caller->key.port != __builtin_bswap16(flow->uli.ports.dport))
		return 0;
	words = (const u32 *)caller->key.address;
	if (words[0] != flow->daddr.in6_u.u6_addr32[0] || words[1] != flow->daddr.in6_u.u6_addr32[1] ||
	    words[2] != flow->daddr.in6_u.u6_addr32[2] || words[3] != flow->daddr.in6_u.u6_addr32[3])
		return 0;
	udp_search_ended(caller, source_port);
	return 0;
}
