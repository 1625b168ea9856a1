/* Reads the current task: its thread, its system call, and the sockets of its descriptors. */
#pragma once
#include "kernel.h"

#define IS_THERE(field) __builtin_preserve_field_info(field, 2)
#define READ(into, place) read_kernel(&(into), sizeof(into), (const void *)&(place))

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
/* The registers of x86-64 and arm64; the loader (CO-RE) finds out which of them the kernel has. */
struct pt_regs {
	unsigned long orig_ax;
	unsigned long di;
	u64 orig_x0;
	int syscallno;
};
#pragma clang attribute pop

/* Stores thread and process id in the PID namespace of the tracing process, or in the initial one for tasks outside. */
INLINE void current_thread(u64 device, u64 inode, u32 *thread, u32 *process)
{
	struct ids_in_namespace ids = {};
	u64 task = current_task_id();
	if (current_ids_in_namespace(device, inode, &ids, sizeof(ids))) {
		ids.thread = task;
		ids.process = task >> 32;
	}
	*thread = ids.thread;
	*process = ids.process;
}

INLINE int call_of(const struct pt_regs *registers)
{
	if (IS_THERE(registers->orig_ax))
		return (int)registers->orig_ax;
	return registers->syscallno;
}

INLINE u32 first_argument(const struct pt_regs *registers)
{
	if (IS_THERE(registers->orig_ax))
		return (u32)registers->di;
	return (u32)registers->orig_x0;
}

INLINE int is_accept(int call)
{
	struct pt_regs *registers = NULL;
	if (IS_THERE(registers->orig_ax))
		return call == 43 || call == 288;
	return call == 202 || call == 242;
}

/* epoll_wait, epoll_pwait, epoll_pwait2, poll, ppoll, select, pselect6 */
INLINE int is_wait(int call)
{
	struct pt_regs *registers = NULL;
	if (IS_THERE(registers->orig_ax))
		return call == 232 || call == 281 || call == 441 || call == 7 || call == 271 || call == 23 || call == 270;
	return call == 22 || call == 441 || call == 73 || call == 72;
}

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct mptcp_sock {
	struct sock *first;
};
#pragma clang attribute pop

/* Returns the TCP socket of a socket of MPTCP, which has the accept queue or is the first subflow; any other socket unchanged. */
INLINE u64 below_mptcp(const struct sock *socket)
{
	const struct mptcp_sock *above = (const struct mptcp_sock *)socket;
	struct sock *first = NULL;
	u16 protocol = 0;
	if (IS_THERE(above->first) && !READ(protocol, socket->sk_protocol) && protocol == MPTCP &&
	    !READ(first, above->first) && first)
		return (u64)first;
	return (u64)socket;
}

/* Returns the socket of a descriptor of the current task, or 0. For a file that is no socket, the address matches no socket. */
INLINE u64 socket_of(u32 descriptor)
{
	struct task_struct *task = current_task();
	struct fdtable *table = task->files->fdt;
	struct file **files;
	struct file *file = NULL;
	struct socket *found = NULL;
	struct sock *socket = NULL;
	if (descriptor >= table->max_fds)
		return 0;
	files = table->fd;
	if (read_kernel(&file, sizeof(file), files + descriptor) || !file)
		return 0;
	if (READ(found, file->private_data) || !found || READ(socket, found->sk))
		return 0;
	return below_mptcp(socket);
}

INLINE int is_tcp(u64 id)
{
	const struct sock *socket = (const struct sock *)id;
	u16 protocol = 0, family = 0;
	READ(protocol, socket->sk_protocol);
	READ(family, socket->__sk_common.skc_family);
	return protocol == TCP && (family == INET || family == INET6);
}

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
/* The further arguments. */
struct pt_regs___arguments {
	unsigned long orig_ax;
	unsigned long si;
	unsigned long dx;
	unsigned long r10;
	unsigned long r8;
	unsigned long r9;
	u64 regs[31];
};
#pragma clang attribute pop

#define ARGUMENT(name, of_x86, number)                                                  \
	INLINE u64 name(const struct pt_regs *context)                                  \
	{                                                                               \
		const struct pt_regs___arguments *registers = (const void *)context;    \
		if (IS_THERE(registers->orig_ax))                                       \
			return registers->of_x86;                                       \
		return registers->regs[number];                                         \
	}

ARGUMENT(second_argument, si, 1)
ARGUMENT(third_argument, dx, 2)
ARGUMENT(fourth_argument, r10, 3)
ARGUMENT(fifth_argument, r8, 4)
ARGUMENT(sixth_argument, r9, 5)
