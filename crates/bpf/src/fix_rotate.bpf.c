/* Tells which threads accept connections of listeners that several workers share, and which registrations of these listeners with
 * epoll(7) are added and removed. crates/bpf/src/fix_rotate.rs is the other half, and has the same layouts. */
#include "counting.h"
#include "current.h"

enum { LISTENERS = 1024, RING_BYTES = 1 << 18 };

struct wanted {
	u64 namespace_device;
	u64 namespace_inode;
};

struct event {
	u64 cookie; /* of the listener */
	u64 data;   /* of struct epoll_event */
	u32 events;
	u32 thread;
	u32 process;
	u32 operation; /* of epoll_ctl(); 0: accept() */
	u32 epoll;
	u32 descriptor;
};

LAYOUT(struct event, 40);

MAP(settings, MAP_ARRAY, 1, u32, struct wanted);

/* Events for which the ring had no room. */
MAP(lost, MAP_ARRAY, 1, u32, u64);

/* The listeners, by cookie. */
MAP(watched, MAP_HASH, LISTENERS, u64, u32);

RING(ring, RING_BYTES);

INLINE int is_epoll_ctl(int call)
{
	struct pt_regs *registers = NULL;
	return call == (IS_THERE(registers->orig_ax) ? 233 : 21);
}

/* Reads the struct epoll_event that the program has passed. It is packed on x86-64 only. */
INLINE void read_event(struct event *event, const struct pt_regs *registers)
{
	u64 place = fourth_argument(registers);
	read_user(&event->events, sizeof(event->events), (const void *)place);
	read_user(&event->data, sizeof(event->data), (const void *)(place + (IS_THERE(registers->orig_ax) ? 4 : 8)));
}

SECTION("tp_btf/sys_exit")
int call_ended(u64 *context)
{
	const struct pt_regs *registers = (const struct pt_regs *)context[0];
	int call = call_of(registers);
	const struct sock *socket;
	struct wanted *wanted;
	struct event *event;
	u32 only = 0, descriptor;
	u64 cookie = 0, *missing;
	/* Runs for every system call of the host. */
	if ((s64)context[1] < 0)
		return 0;
	if (is_accept(call))
		descriptor = first_argument(registers);
	else if (is_epoll_ctl(call))
		descriptor = third_argument(registers);
	else
		return 0;
	socket = (const struct sock *)socket_of(descriptor);
	if (!socket || READ(cookie, socket->__sk_common.skc_cookie) || !map_lookup(&watched, &cookie))
		return 0;
	wanted = map_lookup(&settings, &only);
	missing = map_lookup(&lost, &only);
	if (!wanted || !missing)
		return 0;
	event = ring_reserve(&ring, sizeof(*event), 0);
	if (!event) {
		ADD(*missing, 1);
		return 0;
	}
	__builtin_memset(event, 0, sizeof(*event));
	event->cookie = cookie;
	current_thread(wanted->namespace_device, wanted->namespace_inode, &event->thread, &event->process);
	if (is_epoll_ctl(call)) {
		event->operation = second_argument(registers);
		event->epoll = first_argument(registers);
		event->descriptor = descriptor;
		read_event(event, registers);
	}
	ring_submit(event, 0);
	return 0;
}

char terms[] SECTION("license") = "Dual MIT/GPL";
