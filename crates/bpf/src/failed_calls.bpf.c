/* Counts system calls on sockets that return an error, by call, errno, process and address.
 *
 *   raw_syscalls:sys_exit   the result, and the arguments, which the registers still hold
 *   io_uring_complete       the result of an operation of io_uring; its address is not known
 *   inet_sock_set_state     CLOSE -> SYN_SENT: the errors that follow belong to a connect() that has begun
 *
 * A non-blocking connect() fails later: the program reads the errno by SO_ERROR, by another connect(), or by recv or send. The first of them
 * counts as the failure of connect(). EINTR, EAGAIN and EINPROGRESS are no failures, except that EAGAIN of connect() means no port (UDP) or a
 * full queue (Unix), and that of send() no port if the socket has none (UDP). */
#include "counting.h"
#include "current.h"

/* The same numbers and structs are in failed_calls.rs. */
enum { FAILURES = 4096, ATTEMPTS = 65536, PATH = 108 };
enum call { SOCKET = 1, BIND, LISTEN_, CONNECT, ACCEPT, SEND, RECV, SO_ERROR_ };
enum { OF_TCP = 1, OF_UDP = 2, OF_UNIX = 3, OF_OTHER = 4 };
/* States of a failed connect(): it ended before a SYN was sent; after it; and its socket is still in SYN_SENT. */
enum { BEFORE_SYN = 0, AFTER_SYN = 1, IN_SYN_SENT = 2 };
enum { UNIX = 1, STREAM = 1, DATAGRAM = 2 };
enum { INTERRUPTED = 4, TRY_AGAIN = 11, BAD_DESCRIPTOR = 9, IS_CONNECTED = 106, IN_PROGRESS = 114, NOW_IN_PROGRESS = 115,
       CANCELED = 125 };
/* From here on errnos are of the kernel only, such as ERESTARTSYS. */
enum { MAX_ERRNO = 511 };
enum { SOCKET_FILE = 0140000, FILE_TYPE = 0170000 };

struct wanted {
	u64 cgroup;
	u64 namespace_device;
	u64 namespace_inode;
	u32 flags;
	u32 process;
	u8 name[16];
	u32 network; /* inode of a network namespace */
	u32 hole;
};

struct failure {
	u32 process;
	u32 namespace; /* inode of the network namespace */
	u16 errno;
	u16 port;
	u8 call;
	u8 protocol;
	u8 family; /* of the address; 0: none */
	u8 state;
	u32 zone;
	u8 address[PATH]; /* 16 bytes, IPv4 as ::ffff:a.b.c.d, or the path of a Unix socket */
};

struct count {
	u64 calls;
	u8 name[16];
	u32 range; /* IP_LOCAL_PORT_RANGE of the socket of the first call, high << 16 | low; 0: none */
	u32 mixed; /* whether another call had another range */
};

struct totals {
	u64 lost;
};

LAYOUT(struct wanted, 56);
LAYOUT(struct failure, 128);
LAYOUT(struct count, 32);

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct inode {
	unsigned short i_mode;
	unsigned long i_ino;
};
struct thread_info {
	unsigned long flags;
	unsigned int status;
};
struct task_struct___wide {
	struct thread_info thread_info;
};
struct io_kiocb {
	struct file *file;
	u8 opcode;
};
struct file___typed {
	struct inode *f_inode;
	void *private_data;
};
struct socket___open {
	struct file___typed *file;
};
#pragma clang attribute pop

MAP(settings, MAP_ARRAY, 1, u32, struct wanted);
MAP(sums, MAP_ARRAY, 1, u32, struct totals);
MAP(failures, MAP_HASH, FAILURES, struct failure, struct count);

/* The inodes of sockets that have sent a SYN and are not connected. Of a socket that is closed without another call the entry is left behind,
 * and the kernel may give its address to another socket. */
MAP(attempts, MAP_HASH_FORGETFUL, ATTEMPTS, u64, u32);

/* Returns whether the system call is one of 32 bits, which has other numbers: TS_COMPAT of x86, TIF_32BIT of arm64. */
INLINE int is_narrow(void)
{
	const struct task_struct___wide *task = (const void *)current_task();
	struct pt_regs *registers = NULL;
	unsigned long flags = 0;
	unsigned int status = 0;
	if (IS_THERE(registers->orig_ax)) {
		if (IS_THERE(task->thread_info.status))
			READ(status, task->thread_info.status);
		return status & 2;
	}
	READ(flags, task->thread_info.flags);
	return flags >> 22 & 1;
}

/* Returns the call that an operation of io_uring stands for. */
INLINE u32 ring_kind(u8 operation)
{
	switch (operation) {
	case 13: return ACCEPT;
	case 16: return CONNECT;
	case 56: return BIND;
	case 57: return LISTEN_;
	case 2: case 9: case 23: case 26: case 47: case 48: return SEND;
	case 1: case 10: case 22: case 27: return RECV;
	}
	return 0;
}

INLINE u32 call_kind(int call)
{
	struct pt_regs *registers = NULL;
	if (IS_THERE(registers->orig_ax)) {
		switch (call) {
		case 41: return SOCKET;
		case 42: return CONNECT;
		case 43: case 288: return ACCEPT;
		case 49: return BIND;
		case 50: return LISTEN_;
		case 55: return SO_ERROR_;
		case 1: case 20: case 40: case 44: case 46: case 307: return SEND;
		case 0: case 19: case 45: case 47: case 299: return RECV;
		}
		return 0;
	}
	switch (call) {
	case 198: return SOCKET;
	case 203: return CONNECT;
	case 202: case 242: return ACCEPT;
	case 200: return BIND;
	case 201: return LISTEN_;
	case 209: return SO_ERROR_;
	case 64: case 66: case 71: case 206: case 211: case 269: return SEND;
	case 63: case 65: case 207: case 212: case 243: return RECV;
	}
	return 0;
}

/* Returns the number of the inode of a socket; 0: the kernel's own socket. */
INLINE u32 inode_of(const struct sock *socket)
{
	const struct socket___open *found = NULL;
	const struct file___typed *file = NULL;
	const struct inode *inode = NULL;
	unsigned long number = 0;
	if (READ(found, socket->sk_socket) || !found || READ(file, found->file) || !file || READ(inode, file->f_inode) || !inode)
		return 0;
	READ(number, inode->i_ino);
	return number;
}

/* Returns the socket of a file, or NULL if it is not a socket. */
INLINE const struct sock *socket_in(const struct file___typed *file)
{
	struct inode *inode = NULL;
	struct socket *found = NULL;
	struct sock *socket = NULL;
	unsigned short mode = 0;
	if (READ(inode, file->f_inode) || !inode || READ(mode, inode->i_mode) || (mode & FILE_TYPE) != SOCKET_FILE)
		return NULL;
	if (READ(found, file->private_data) || !found || READ(socket, found->sk))
		return NULL;
	return socket;
}

/* Returns the socket of a descriptor, or NULL if it is not a socket. */
INLINE const struct sock *socket_at(u32 descriptor)
{
	struct fdtable *table = current_task()->files->fdt;
	struct file **files;
	struct file___typed *file = NULL;
	if (descriptor >= table->max_fds)
		return NULL;
	files = table->fd;
	if (read_kernel(&file, sizeof(file), files + descriptor) || !file)
		return NULL;
	return socket_in(file);
}

INLINE u32 protocol_of(u32 family, u32 protocol)
{
	if (family == UNIX)
		return OF_UNIX;
	if (family != INET && family != INET6)
		return 0;
	if (protocol == TCP || protocol == MPTCP)
		return OF_TCP;
	return protocol == UDP ? OF_UDP : OF_OTHER;
}

/* The type of socket(), without SOCK_NONBLOCK and SOCK_CLOEXEC. */
INLINE u32 protocol_of_type(u32 family, u32 type)
{
	type &= 15;
	return protocol_of(family, type == STREAM ? TCP : type == DATAGRAM ? UDP : 0);
}

/* Stores the address that the program has passed. */
INLINE void put_passed(struct failure *failure, u64 place, u32 length)
{
	u8 head[28] = {};
	u32 *words = (u32 *)failure->address;
	u16 family;
	if (length < 2 || read_user(head, 8, (const void *)place))
		return;
	family = *(u16 *)head;
	if (family == INET) {
		words[2] = __builtin_bswap32(0xffff);
		__builtin_memcpy(&words[3], head + 4, 4);
		failure->port = __builtin_bswap16(*(u16 *)(head + 2));
	} else if (family == INET6) {
		if (read_user(head, 28, (const void *)place))
			return;
		__builtin_memcpy(words, head + 8, 16);
		failure->port = __builtin_bswap16(*(u16 *)(head + 2));
		__builtin_memcpy(&failure->zone, head + 24, 4);
	} else if (family == UNIX) {
		if (length > 2 + PATH)
			length = 2 + PATH;
		length -= 2;
		if (length > PATH || (length && read_user(failure->address, length, (const void *)(place + 2))))
			return;
	} else {
		return;
	}
	failure->family = family;
}

/* Returns whether the call is sendto(). */
INLINE int is_sendto(int call)
{
	struct pt_regs *registers = NULL;
	return call == (IS_THERE(registers->orig_ax) ? 44 : 206);
}

/* Stores the address that the socket does not have: the arguments of connect(), or of sendto(). */
INLINE void put_target(struct failure *failure, const struct pt_regs *registers, u32 kind)
{
	if (kind == CONNECT)
		put_passed(failure, second_argument(registers), third_argument(registers));
	else if (is_sendto(call_of(registers)))
		put_passed(failure, fifth_argument(registers), sixth_argument(registers));
}

/* Returns IP_LOCAL_PORT_RANGE of a socket, high << 16 | low; 0: none. */
INLINE u32 own_range(const struct sock *socket)
{
	const struct inet_sock___packed *packed = (const void *)socket;
	const struct inet_sock___pair *pair = (const void *)socket;
	u32 range = 0;
	if (IS_THERE(packed->local_port_range))
		READ(range, packed->local_port_range);
	else if (IS_THERE(pair->local_port_range.lo))
		read_kernel(&range, sizeof(range), &pair->local_port_range.lo);
	return range;
}

/* Stores the local address of a listener. */
INLINE void put_local(struct failure *failure, const struct sock *socket, u32 family)
{
	u32 *words = (u32 *)failure->address;
	if (family == INET) {
		words[2] = __builtin_bswap32(0xffff);
		READ(words[3], socket->__sk_common.skc_rcv_saddr);
	} else if (family == INET6) {
		read_kernel(words, 16, &socket->__sk_common.skc_v6_rcv_saddr);
	} else {
		return;
	}
	READ(failure->port, socket->__sk_common.skc_num);
	failure->family = family;
}

/* Stores the address of the peer of a failed connect(), or of a connected socket. */
INLINE void put_peer(struct failure *failure, const struct sock *socket, u32 family)
{
	u32 *words = (u32 *)failure->address;
	u16 port = 0;
	READ(port, socket->__sk_common.skc_dport);
	if (!port)
		return;
	if (family == INET) {
		words[2] = __builtin_bswap32(0xffff);
		READ(words[3], socket->__sk_common.skc_daddr);
	} else if (family == INET6) {
		read_kernel(words, 16, &socket->__sk_common.skc_v6_daddr);
	} else {
		return;
	}
	failure->port = __builtin_bswap16(port);
	failure->family = family;
}

INLINE void count_failure(const struct wanted *wanted, struct failure *failure, const struct sock *socket)
{
	u32 only = 0;
	struct count *known, count = {};
	struct totals *totals;
	if (!is_wanted_network(wanted->flags, wanted->network, failure->namespace))
		return;
	failure->process = current_process(wanted->namespace_device, wanted->namespace_inode);
	if (wanted->flags & HAS_PROCESS && wanted->process != failure->process)
		return;
	if (!is_wanted_thread(wanted->flags, wanted->name, wanted->cgroup))
		return;
	if (failure->call == CONNECT && (failure->protocol == OF_TCP || failure->protocol == OF_UDP))
		count.range = own_range(socket);
	known = map_lookup(&failures, failure);
	if (!known) {
		process_name(count.name);
		/* EEXIST: another processor has added it. */
		map_update(&failures, failure, &count, NOT_TWICE);
		known = map_lookup(&failures, failure);
	}
	if (known) {
		ADD(known->calls, 1);
		if (known->range != count.range)
			known->mixed = 1;
		return;
	}
	totals = map_lookup(&sums, &only);
	if (totals)
		ADD(totals->lost, 1);
}

INLINE int is_failure(u32 kind, u32 errno)
{
	if (!errno || errno == INTERRUPTED || errno == BAD_DESCRIPTOR || errno == CANCELED)
		return 0;
	if (kind == SEND)
		return 1;
	if (kind != CONNECT)
		return errno != TRY_AGAIN;
	return errno != IN_PROGRESS && errno != NOW_IN_PROGRESS && errno != IS_CONNECTED;
}

/* Returns whether EAGAIN of a send() says that the queue is full, and not that a socket of UDP found no port. */
INLINE int is_full_queue(u32 kind, u32 errno, const struct sock *socket, u32 protocol)
{
	u16 port = 0;
	if (kind != SEND || errno != TRY_AGAIN)
		return 0;
	READ(port, socket->__sk_common.skc_num);
	return protocol != OF_UDP || port;
}

/* Stores what the socket of a failed call tells. Returns the call: one that reports the end of a connect() is a connect(). */
INLINE u32 put_socket(struct failure *failure, const struct sock *socket, u32 kind, u32 *family)
{
	const struct net *net = NULL;
	u64 id = (u64)socket;
	u16 number = 0, short_family = 0;
	u8 state = 0;
	u32 *attempt = NULL;
	READ(short_family, socket->__sk_common.skc_family);
	READ(number, socket->sk_protocol);
	*family = short_family;
	failure->protocol = protocol_of(short_family, number);
	READ(net, socket->__sk_common.skc_net.net);
	READ(failure->namespace, net->ns.inum);
	if (failure->protocol == OF_TCP && (kind >= SEND || kind == CONNECT))
		attempt = map_lookup(&attempts, &id);
	if (attempt && *attempt == inode_of(socket)) {
		READ(state, socket->__sk_common.skc_state);
		failure->state = state == SYN_SENT ? IN_SYN_SENT : AFTER_SYN;
		map_delete(&attempts, &id);
		if (kind != CONNECT)
			put_peer(failure, socket, short_family);
		kind = CONNECT;
	}
	if (failure->protocol == OF_UDP && (kind == SEND || kind == RECV))
		put_peer(failure, socket, short_family);
	return kind;
}

SECTION("tp_btf/sys_exit")
int call_failed(u64 *context)
{
	const struct pt_regs *registers = (const struct pt_regs *)context[0];
	s64 result = (s64)context[1];
	const struct sock *socket = NULL;
	struct failure failure = {};
	struct wanted *wanted;
	u32 only = 0, errno, called, kind, family = 0;
	/* Runs for every system call of the host. */
	if (result > 0 || result < -MAX_ERRNO)
		return 0;
	kind = call_kind(call_of(registers));
	if (!kind || is_narrow())
		return 0;
	errno = -result;
	if (kind == SO_ERROR_) {
		int pending = 0;
		/* SOL_SOCKET and SO_ERROR */
		if (errno || (u32)second_argument(registers) != 1 || (u32)third_argument(registers) != 4)
			return 0;
		if (read_user(&pending, sizeof(pending), (const void *)fourth_argument(registers)) || pending <= 0)
			return 0;
		errno = pending;
	} else if (!is_failure(kind, errno)) {
		return 0;
	}
	wanted = map_lookup(&settings, &only);
	if (!wanted)
		return 0;
	if (kind == SOCKET) {
		family = first_argument(registers);
		failure.protocol = protocol_of_type(family, second_argument(registers));
		failure.namespace = current_network();
	} else {
		socket = socket_at(first_argument(registers));
		if (!socket)
			return 0;
		called = kind;
		kind = put_socket(&failure, socket, kind, &family);
		if (is_full_queue(kind, errno, socket, failure.protocol))
			return 0;
		if ((kind == CONNECT || (kind == SEND && failure.protocol == OF_UDP)) && !failure.family)
			put_target(&failure, registers, called);
	}
	if (!failure.protocol || kind == SO_ERROR_)
		return 0;
	failure.errno = errno;
	failure.call = kind;
	if (kind == BIND)
		put_passed(&failure, second_argument(registers), third_argument(registers));
	else if (kind == LISTEN_ || kind == ACCEPT)
		put_local(&failure, socket, family);
	count_failure(wanted, &failure, socket);
	return 0;
}

/* Runs in the task that submitted the operation, or in a worker or poller thread of its process. */
SECTION("tp_btf/io_uring_complete")
int ring_failed(u64 *context)
{
	const struct io_kiocb *request = (const struct io_kiocb *)context[1];
	const struct io_uring_cqe *completion = (const struct io_uring_cqe *)context[2];
	const struct sock *socket;
	struct file *file = NULL;
	struct failure failure = {};
	struct wanted *wanted;
	u32 only = 0, kind, family = 0;
	int result = 0;
	u8 operation = 0;
	if (READ(result, completion->res) || result >= 0 || result < -MAX_ERRNO)
		return 0;
	if (READ(operation, request->opcode))
		return 0;
	kind = ring_kind(operation);
	if (!kind || !is_failure(kind, -result))
		return 0;
	wanted = map_lookup(&settings, &only);
	if (!wanted || READ(file, request->file) || !file)
		return 0;
	socket = socket_in((const struct file___typed *)file);
	if (!socket)
		return 0;
	kind = put_socket(&failure, socket, kind, &family);
	if (!failure.protocol || is_full_queue(kind, -result, socket, failure.protocol))
		return 0;
	failure.errno = -result;
	failure.call = kind;
	if (kind == LISTEN_ || kind == ACCEPT)
		put_local(&failure, socket, family);
	count_failure(wanted, &failure, socket);
	return 0;
}

SECTION("tp_btf/inet_sock_set_state")
int attempt_began(u64 *context)
{
	u64 id = context[0];
	int from = (int)context[1];
	int to = (int)context[2];
	if (from == CLOSED && to == SYN_SENT) {
		u32 inode = inode_of((const struct sock *)id);
		map_update(&attempts, &id, &inode, ANY);
	} else if (from == SYN_SENT && to == ESTABLISHED)
		map_delete(&attempts, &id);
	return 0;
}

char terms[] SECTION("license") = "Dual MIT/GPL";
