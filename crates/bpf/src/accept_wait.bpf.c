/* Traces TCP connections from the handshake to accept(), and records which worker accepts each connection.
 *
 *   known     an iterator over the files of all tasks finds the listeners that are there when the trace begins, and one over the TCP
 *             sockets of a namespace those of MPTCP
 *   queued    sk_data_ready of the listener, right after inet_sock_set_state SYN_RECV -> ESTABLISHED of the connection on the
 *             same processor; this order links the connection to its listener
 *   accepted  sys_exit of accept() or accept4(), or io_uring_complete: the socket is in the table of the task's files
 *   found none sys_exit with EAGAIN; a task that returned from epoll_wait() or a similar call just before had a spurious
 *             wakeup
 *   failed    sys_exit with another error, such as EMFILE
 *   closed    inet_sock_set_state out of ESTABLISHED: to FIN_WAIT1 in the task that closes
 *   dropped   the listener's sk_drops, read with each connection and by the tracing process (`look`); kfree_skb shows which
 *             of the drops are final ACKs
 *
 * The programs count everything themselves; there are no events. */
#include "accept_wait.h"
#include "current.h"

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

/* Stores the address that a listener is bound to, IPv4 as ::ffff:a.b.c.d. */
INLINE void put_own_address(u8 *address, const struct sock *socket)
{
	u32 *words = (u32 *)address;
	if (socket->__sk_common.skc_family == INET) {
		words[0] = 0;
		words[1] = 0;
		words[2] = __builtin_bswap32(0xffff);
		words[3] = socket->__sk_common.skc_rcv_saddr;
	} else {
		words[0] = socket->__sk_common.skc_v6_rcv_saddr.in6_u.u6_addr32[0];
		words[1] = socket->__sk_common.skc_v6_rcv_saddr.in6_u.u6_addr32[1];
		words[2] = socket->__sk_common.skc_v6_rcv_saddr.in6_u.u6_addr32[2];
		words[3] = socket->__sk_common.skc_v6_rcv_saddr.in6_u.u6_addr32[3];
	}
}

INLINE int is_wanted_task(const struct wanted *wanted, u32 process)
{
	if (wanted->flags & HAS_PROCESS && wanted->process != process)
		return 0;
	return is_wanted_thread(wanted->flags, wanted->name, wanted->cgroup);
}

/* Called in the task that the entry is for, because it stores the current task's name. */
INLINE struct worker *worker_of(struct totals *totals, const struct worker_key *key)
{
	u32 only = 0;
	u8 name[16];
	struct worker *worker = map_lookup(&workers, key);
	if (worker)
		return worker;
	worker = map_lookup(&blank_worker, &only);
	if (!worker)
		return NULL;
	map_update(&workers, key, worker, NOT_TWICE);
	worker = map_lookup(&workers, key);
	if (!worker) {
		ADD(totals->lost_workers, 1);
		return NULL;
	}
	current_name(name, sizeof(name));
	__builtin_memcpy(worker->name, name, sizeof(name));
	return worker;
}

/* SYNs that meet a full queue call no hook and only show in sk_drops. The queue counts as full if it was full after the last
 * connection or at the last look. */
INLINE void take_drops(struct listener *listener, u64 drops, u32 depth, u32 backlog)
{
	u64 last = __sync_lock_test_and_set(&listener->drops, drops);
	u64 more = drops - last;
	if (drops != last) {
		if (listener->was_full)
			ADD(listener->full_drops, more);
		else
			ADD(listener->other_drops, more);
	}
	listener->was_full = depth > backlog;
	listener->backlog = backlog;
}

INLINE struct listener *listener_of(struct totals *totals, const struct wanted *wanted, const struct sock *socket,
				    u64 cookie)
{
	u32 only = 0;
	u8 address[16];
	const struct sock_reuseport *group;
	struct listener *listener = map_lookup(&listeners, &cookie);
	if (listener)
		return listener;
	if (wanted->flags & HAS_PORT && wanted->port != socket->__sk_common.skc_num)
		return NULL;
	if (!is_wanted_network(wanted->flags, wanted->network, socket->__sk_common.skc_net.net->ns.inum))
		return NULL;
	put_own_address(address, socket);
	if (wanted->flags & HAS_ADDRESS && !same_16(wanted->address, address))
		return NULL;
	listener = map_lookup(&blank_listener, &only);
	if (!listener)
		return NULL;
	map_update(&listeners, &cookie, listener, NOT_TWICE);
	listener = map_lookup(&listeners, &cookie);
	if (!listener) {
		ADD(totals->lost_listeners, 1);
		return NULL;
	}
	listener->drops = socket->sk_drops.counter;
	listener->socket = (u64)socket;
	listener->network = socket->__sk_common.skc_net.net->ns.inum;
	listener->port = socket->__sk_common.skc_num;
	__builtin_memcpy(listener->address, address, sizeof(address));
	group = socket->sk_reuseport_cb;
	if (group)
		listener->group = group->num_socks;
	return listener;
}

INLINE void longest(u64 *place, u64 ns)
{
	for (int tries = 0; tries < 4; tries++) {
		u64 longest = *place;
		if (ns <= longest || __sync_val_compare_and_swap(place, longest, ns) == longest)
			break;
	}
}

INLINE void count_coarse(u32 *buckets, u64 ns)
{
	u32 bucket = bucket_of(ns, COARSE_BITS);
	if (bucket < COARSE)
		__sync_fetch_and_add(&buckets[bucket], 1);
}

/* The listener has put a connection in its accept queue. */
INLINE void queued(struct totals *totals, const struct sock *socket)
{
	u32 only = 0;
	struct wanted *wanted = the_wanted();
	struct fresh *fresh = map_lookup(&latest, &only);
	struct connection connection = {};
	struct listener *listener;
	u64 id, cookie, ns;
	u32 depth, backlog;
	if (!wanted || !fresh || !fresh->socket)
		return;
	id = fresh->socket;
	if (fresh->port != socket->__sk_common.skc_num || fresh->network != (u64)socket->__sk_common.skc_net.net)
		return;
	fresh->socket = 0;
	cookie = socket_cookie(socket);
	listener = listener_of(totals, wanted, socket, cookie);
	if (!listener)
		return;
	depth = socket->sk_ack_backlog;
	backlog = socket->sk_max_ack_backlog;
	take_drops(listener, socket->sk_drops.counter, depth, backlog);
	ADD(listener->queued, 1);
	ADD(listener->depth_sum, depth);
	if (depth > backlog)
		ADD(listener->full, 1);
	if (depth > listener->depth_max)
		listener->depth_max = depth;
	if (fresh->retries) {
		ADD(listener->retried, 1);
	} else if (fresh->srtt) {
		ns = (u64)(fresh->srtt >> SRTT_SHIFT) * 1000;
		count_time(&totals->handshake, ns);
		ADD(listener->handshake_ns, ns);
		longest(&listener->handshake_max_ns, ns);
		count_coarse(listener->handshakes, ns);
	}
	connection.established_ns = fresh->at_ns;
	connection.worker.listener = cookie;
	connection.reads = fresh->reads;
	connection.port = fresh->port;
	if (map_update(&connections, &id, &connection, ANY))
		ADD(totals->lost_sockets, 1);
}

INLINE void established(struct totals *totals, const struct sock *socket)
{
	u32 only = 0;
	struct wanted *wanted = the_wanted();
	struct fresh *fresh = map_lookup(&latest, &only);
	const struct tcp_sock *tcp = (const struct tcp_sock *)socket;
	if (!wanted || !fresh)
		return;
	if (fresh->socket)
		ADD(totals->unmatched, 1);
	fresh->socket = 0;
	if (wanted->flags & HAS_PORT && wanted->port != socket->__sk_common.skc_num)
		return;
	fresh->port = socket->__sk_common.skc_num;
	fresh->network = (u64)socket->__sk_common.skc_net.net;
	fresh->reads = 0;
	READ(fresh->srtt, tcp->srtt_us);
	READ(fresh->retries, tcp->total_retrans);
	fresh->at_ns = monotonic_ns();
	fresh->socket = (u64)socket;
}

INLINE void remember(u64 task, u8 has_accepted)
{
	struct task state = {};
	/* A lookup is cheaper than an update that evicts another task: the map has room for nearly all tasks. */
	struct task *known = map_lookup(&tasks, &task);
	if (known) {
		known->has_waited = 0;
		known->has_accepted = has_accepted;
		return;
	}
	state.has_accepted = has_accepted;
	map_update(&tasks, &task, &state, ANY);
}

/* Adds the reads from before accept() to the worker. The exchange gives them to the first caller only. */
INLINE void give_reads(struct connection *connection, struct worker *worker)
{
	ADD(worker->reads, __sync_lock_test_and_set(&connection->reads, 0));
}

/* Counts an accept. The task has a descriptor of the connection. */
INLINE void accepted(struct totals *totals, struct wanted *wanted, u64 id, struct connection *connection)
{
	u64 ns = monotonic_ns();
	struct listener *listener;
	struct worker *worker;
	struct worker_key key = {};
	u32 marks;
	u64 cookie;
	if (connection->marks & ACCEPTED)
		return;
	ns -= connection->established_ns;
	cookie = connection->worker.listener;
	listener = map_lookup(&listeners, &cookie);
	if (!listener)
		return;
	ADD(listener->accepted, 1);
	key.listener = cookie;
	current_thread(wanted->namespace_device, wanted->namespace_inode, &key.thread, &key.process);
	if (!is_wanted_task(wanted, key.process)) {
		ADD(totals->other_tasks, 1);
		map_delete(&connections, &id);
		return;
	}
	count_time(&totals->wait, ns);
	count_time(&listener->wait, ns);
	/* The worker is set before the mark, because a program that sees the mark counts for the worker. */
	worker = worker_of(totals, &key);
	connection->worker = key;
	marks = __sync_fetch_and_or(&connection->marks, ACCEPTED);
	if (!worker)
		return;
	ADD(worker->accepts, 1);
	ADD(worker->wait_ns, ns);
	longest(&worker->wait_max_ns, ns);
	count_coarse(worker->waits, ns);
	if (!(marks & ENDED))
		ADD(worker->open, 1);
	give_reads(connection, worker);
	remember(current_task_id(), 1);
}

/* Returns the worker that calls accept() for a listener. */
INLINE struct worker *caller(struct totals *totals, struct wanted *wanted, u64 id)
{
	const struct sock *socket = (const struct sock *)id;
	struct worker_key key = {};
	READ(key.listener, socket->__sk_common.skc_cookie.counter);
	if (!key.listener || !map_lookup(&listeners, &key.listener))
		return NULL;
	current_thread(wanted->namespace_device, wanted->namespace_inode, &key.thread, &key.process);
	if (!is_wanted_task(wanted, key.process))
		return NULL;
	return worker_of(totals, &key);
}

/* Counts an accept() that returned EAGAIN. */
INLINE void found_none(struct totals *totals, struct wanted *wanted, u64 id)
{
	struct worker *worker = caller(totals, wanted, id);
	struct task *state;
	u64 task = current_task_id();
	if (!worker)
		return;
	ADD(worker->empty, 1);
	state = map_lookup(&tasks, &task);
	if (!state) {
		/* It is not known whether the task has waited; record its waits from now on. */
		remember(task, 0);
		return;
	}
	if (state->has_waited && !state->has_accepted)
		ADD(worker->woken, 1);
	state->has_waited = 0;
}

/* Counts an accept() that returned another error, such as EMFILE: the connection stays in the queue. */
INLINE void failed(struct totals *totals, struct wanted *wanted, u64 id, u32 error)
{
	struct worker *worker = caller(totals, wanted, id);
	if (!worker)
		return;
	ADD(worker->failed, 1);
	worker->error = error;
}

/* Counts a connection whose accept no hook reported. */
INLINE void unseen(struct totals *totals, struct listener *listener)
{
	ADD(listener->unseen, 1);
	ADD(totals->unseen, 1);
}

/* The kernel skips a program if an interrupt with the same event arrives while the program runs. If the end of a connection
 * was missed that way, its entry must not be used for a new socket at the same address. */
INLINE struct connection *connection_of(const struct sock *socket, u64 id)
{
	struct connection *connection = map_lookup(&connections, &id);
	u32 port = socket->__sk_common.skc_num;
	/* In CLOSED the socket has no port any more. */
	if (!connection || !port || connection->port == port)
		return connection;
	map_delete(&connections, &id);
	return NULL;
}

/* Returns whether the program closes a connection soon, and has read nothing from it: it has no use for the connection. A close with data
 * unread, or with SO_LINGER of 0, goes to CLOSED at once, as a reset by the peer does, which has an error. */
INLINE int turns_away(const struct sock *socket, const struct connection *connection)
{
	enum { SOON_NS = 1000000000 };
	const struct tcp_sock *tcp = (const struct tcp_sock *)socket;
	u32 copied = 0, next = 0;
	u64 received = 0;
	if (socket->sk_err || monotonic_ns() - connection->established_ns > SOON_NS)
		return 0;
	READ(copied, tcp->copied_seq);
	READ(next, tcp->rcv_nxt);
	READ(received, tcp->bytes_received);
	return copied == next - (u32)received;
}

/* Counts a close by the program or by the peer. */
INLINE void left(struct totals *totals, const struct sock *socket, int from, int to)
{
	u64 id = (u64)socket;
	struct connection *connection = connection_of(socket, id);
	struct wanted *wanted = the_wanted();
	struct worker_key key = {};
	struct listener *listener;
	struct worker *worker;
	u32 marks;
	if (!connection || !wanted)
		return;
	key.listener = connection->worker.listener;
	listener = map_lookup(&listeners, &key.listener);
	if (!listener)
		return;
	if (!(connection->marks & ACCEPTED) && socket->sk_socket) {
		/* The peer may close while accept() is still returning. Only a process with the descriptor closes the socket, and a
		 * reported accept() has returned by then. */
		if (to == FIN_WAIT1 || to == LAST_ACK) {
			unseen(totals, listener);
			map_delete(&connections, &id);
			return;
		}
		__sync_fetch_and_or(&connection->marks, TAKEN);
	}
	if (from == ESTABLISHED && to == CLOSE_WAIT) {
		ADD(listener->closed_by_peer, 1);
		return;
	}
	if (from == ESTABLISHED && to == CLOSED)
		ADD(listener->reset, 1);
	marks = __sync_fetch_and_or(&connection->marks, ENDED);
	if ((marks & (ACCEPTED | ENDED)) == ACCEPTED) {
		worker = map_lookup(&workers, &connection->worker);
		if (worker)
			ADD(worker->open, -1);
	}
	if (from == ESTABLISHED && (to == FIN_WAIT1 || to == CLOSED) && marks & ACCEPTED &&
	    turns_away(socket, connection))
		ADD(listener->turned_away, 1);
	if (from == ESTABLISHED && to == FIN_WAIT1 && marks & ACCEPTED) {
		current_thread(wanted->namespace_device, wanted->namespace_inode, &key.thread, &key.process);
		worker = worker_of(totals, &key);
		if (worker)
			ADD(worker->closed, 1);
	}
}

SECTION("tp_btf/inet_sock_set_state")
int set_state(u64 *context)
{
	const struct sock *socket = (const struct sock *)context[0];
	int from = (int)context[1];
	int to = (int)context[2];
	struct totals *totals;
	struct listener *listener;
	u64 cookie;
	if (socket->sk_protocol != TCP)
		return 0;
	totals = the_totals();
	if (!totals)
		return 0;
	if (from == SYN_RECV && to == ESTABLISHED) {
		established(totals, socket);
	} else if (from == ESTABLISHED || from == CLOSE_WAIT) {
		left(totals, socket, from, to);
	} else if (from == LISTEN && to == CLOSED) {
		cookie = socket_cookie(socket);
		listener = map_lookup(&listeners, &cookie);
		if (listener) {
			take_drops(listener, socket->sk_drops.counter, socket->sk_ack_backlog,
				   socket->sk_max_ack_backlog);
			listener->socket = 0;
		}
	}
	return 0;
}

SECTION("tp_btf/sk_data_ready")
int data_ready(u64 *context)
{
	const struct sock *socket = (const struct sock *)context[0];
	struct connection *connection;
	struct totals *totals;
	struct worker *worker;
	struct fresh *fresh;
	u32 only = 0;
	u64 id = (u64)socket;
	if (socket->sk_protocol != TCP)
		return 0;
	totals = the_totals();
	if (!totals)
		return 0;
	if (socket->__sk_common.skc_state == LISTEN) {
		queued(totals, socket);
		return 0;
	}
	/* A FIN calls the same hook, in the next state. */
	if (socket->__sk_common.skc_state != ESTABLISHED)
		return 0;
	connection = connection_of(socket, id);
	if (!connection) {
		/* Data that arrived with the final ACK. */
		fresh = map_lookup(&latest, &only);
		if (fresh && fresh->socket == id)
			fresh->reads++;
		return 0;
	}
	if (!(connection->marks & ACCEPTED)) {
		/* accept() may run at the same time: the later of the two programs adds the read to the worker. */
		ADD(connection->reads, 1);
		if (!(__sync_fetch_and_or(&connection->marks, 0) & ACCEPTED))
			return 0;
		worker = map_lookup(&workers, &connection->worker);
		if (worker)
			give_reads(connection, worker);
		return 0;
	}
	worker = map_lookup(&workers, &connection->worker);
	if (worker)
		ADD(worker->reads, 1);
	return 0;
}

SECTION("tp_btf/tcp_destroy_sock")
int destroyed(u64 *context)
{
	u64 id = context[0];
	struct connection *connection = map_lookup(&connections, &id);
	struct listener *listener;
	struct totals *totals;
	u64 cookie;
	if (!connection)
		return 0;
	cookie = connection->worker.listener;
	listener = !(connection->marks & ACCEPTED) ? map_lookup(&listeners, &cookie) : NULL;
	totals = the_totals();
	if (listener && totals) {
		if (connection->marks & TAKEN)
			unseen(totals, listener);
		else
			ADD(listener->never_accepted, 1);
	}
	map_delete(&connections, &id);
	return 0;
}

SECTION("tp_btf/sys_exit")
int call_ended(u64 *context)
{
	const struct pt_regs *registers = (const struct pt_regs *)context[0];
	s64 result = (s64)context[1];
	struct connection *connection;
	struct totals *totals;
	struct wanted *wanted;
	struct task *state;
	u64 task, id;
	int call;
	/* Runs for every system call of the host. */
	call = call_of(registers);
	if (is_wait(call)) {
		if (result <= 0)
			return 0;
		task = current_task_id();
		state = map_lookup(&tasks, &task);
		if (state) {
			state->has_waited = 1;
			state->has_accepted = 0;
		}
		return 0;
	}
	if (!is_accept(call) || result == -EINTR || result <= -RESTART)
		return 0;
	totals = the_totals();
	wanted = the_wanted();
	if (!totals || !wanted)
		return 0;
	if (result >= 0) {
		id = socket_of(result);
		if (!id)
			return 0;
		connection = map_lookup(&connections, &id);
		if (connection)
			accepted(totals, wanted, id, connection);
		else if (is_tcp(id) && !wanted->flags)
			ADD(totals->earlier, 1);
		return 0;
	}
	id = socket_of(first_argument(registers));
	if (!id)
		return 0;
	if (result == -EAGAIN)
		found_none(totals, wanted, id);
	else
		failed(totals, wanted, id, -result);
	return 0;
}

/* Runs for completions of all operations. The result of an accept is a descriptor of a queued connection. */
SECTION("tp_btf/io_uring_complete")
int ring_completed(u64 *context)
{
	const struct io_uring_cqe *completion = (const struct io_uring_cqe *)context[2];
	struct connection *connection;
	struct totals *totals;
	struct wanted *wanted;
	int result = -1;
	u64 id;
	if (READ(result, completion->res) || result < 0)
		return 0;
	id = socket_of(result);
	if (!id)
		return 0;
	totals = the_totals();
	wanted = the_wanted();
	connection = map_lookup(&connections, &id);
	if (totals && wanted && connection)
		accepted(totals, wanted, id, connection);
	return 0;
}

/* A final ACK that met a full queue. Dropped SYNs do not call this hook. */
SECTION("tp_btf/kfree_skb")
int packet_dropped(u64 *context)
{
	const struct sock *socket = (const struct sock *)context[3];
	struct listener *listener;
	u64 cookie;
	if (!socket || socket->__sk_common.skc_state != LISTEN || socket->sk_protocol != TCP ||
	    socket->sk_ack_backlog <= socket->sk_max_ack_backlog)
		return 0;
	cookie = socket_cookie(socket);
	listener = map_lookup(&listeners, &cookie);
	if (listener)
		ADD(listener->refused_acks, 1);
	return 0;
}

/* The tracing process runs this program with the cookie of a listener. */
SECTION("raw_tp/look")
int look(u64 *context)
{
	u64 cookie = context[0];
	struct listener *listener = map_lookup(&listeners, &cookie);
	const struct sock *socket;
	u32 depth = 0, backlog = 0;
	int drops = 0;
	u64 found = 0;
	u8 state = 0;
	if (!listener || !listener->socket)
		return 0;
	socket = (const struct sock *)listener->socket;
	READ(drops, socket->sk_drops.counter);
	READ(depth, socket->sk_ack_backlog);
	READ(backlog, socket->sk_max_ack_backlog);
	READ(state, socket->__sk_common.skc_state);
	/* Read last: the address still belongs to the socket with this cookie. */
	READ(found, socket->__sk_common.skc_cookie.counter);
	if (found != cookie || state != LISTEN)
		return 0;
	take_drops(listener, drops, depth, backlog);
	return 0;
}

/* The context of iterators (include/linux/bpf.h): the same on all kernels. */
struct task_file {
	void *meta;
	void *task;
	u64 descriptor;
	struct file *file;
};

static struct socket *(*const socket_of_file)(struct file *file) = (void *)162;

/* Notes a listener that was there before the trace. */
INLINE void known(struct totals *totals, const struct wanted *wanted, const struct sock *own)
{
	u64 cookie = socket_cookie(own);
	u32 depth = own->sk_ack_backlog;
	u32 backlog = own->sk_max_ack_backlog;
	struct listener *listener;
	/* Another descriptor of it may have been seen. */
	if (map_lookup(&listeners, &cookie))
		return;
	/* Leave room for listeners that get connections. */
	if (!depth && totals->seeded >= LISTENERS / 2)
		return;
	listener = listener_of(totals, wanted, own, cookie);
	if (!listener)
		return;
	totals->seeded++;
	take_drops(listener, own->sk_drops.counter, depth, backlog);
	if (depth > listener->depth_max)
		listener->depth_max = depth;
}

/* The tracing process reads this iterator once. Without it, a listener has no entry until it queues a connection, which a listener whose
 * queue is full never does. */
SECTION("iter/task_file")
int seed(struct task_file *context)
{
	struct file *file = context->file;
	struct totals *totals = the_totals();
	struct wanted *wanted = the_wanted();
	const struct socket *socket;
	const struct sock *own;
	if (!file || !totals || !wanted)
		return 0;
	socket = socket_of_file(file);
	if (!socket)
		return 0;
	own = socket->sk;
	if (!own || own->__sk_common.skc_state != LISTEN ||
	    (own->__sk_common.skc_family != INET && own->__sk_common.skc_family != INET6))
		return 0;
	if (own->sk_protocol == MPTCP &&
	    is_wanted_network(wanted->flags, wanted->network, own->__sk_common.skc_net.net->ns.inum))
		ADD(totals->mptcp, 1);
	if (own->sk_protocol == TCP)
		known(totals, wanted, own);
	return 0;
}

struct tcp_iteration {
	void *meta;
	void *socket;
};

static const struct sock *(*const tcp_socket_of)(void *socket) = (void *)137;

/* The accept queue of MPTCP is that of a TCP socket without a file (`first` of struct mptcp_sock). */
SECTION("iter/tcp")
int seed_namespace(struct tcp_iteration *context)
{
	void *any = context->socket;
	struct totals *totals = the_totals();
	struct wanted *wanted = the_wanted();
	const struct sock *own;
	if (!any || !totals || !wanted)
		return 0;
	own = tcp_socket_of(any);
	if (own && own->__sk_common.skc_state == LISTEN)
		known(totals, wanted, own);
	return 0;
}

char terms[] SECTION("license") = "Dual MIT/GPL";
