/* Writes a record for each TIME_WAIT socket whose connection had no TCP timestamps, in the network namespace of the reading process, to
 * that process: the search of connect() does not take the port of such a socket (tcp_twsk_unique), and sock_diag(7) does not tell.
 *
 * Offsets of fields: see socket_holders.bpf.c. The layout of the record is repeated in iterator.rs. */
#include "kernel.h"

/* The context of iterators (include/linux/bpf.h): the same on all kernels. */
struct iterator_meta {
	void *sequence;
};

struct tcp_iterator {
	struct iterator_meta *meta;
	void *socket;
};

struct record {
	u32 local[4]; /* IPv4 as ::ffff:a.b.c.d */
	u32 remote[4];
	u16 port;
	u16 remote_port; /* in network order */
	u32 hole;
};

static long (*const sequence_write)(void *into, const void *bytes, u32 size) = (void *)127;
static void *(*const as_time_wait)(void *socket) = (void *)138;

#define OFFSET(structure, field) extern const char offset_of__##structure##__##field[]
#define AT(type, pointer, structure, field) (*(type *)((char *)(pointer) + (u64)offset_of__##structure##__##field))

OFFSET(sock_common, skc_daddr);
OFFSET(sock_common, skc_dport);
OFFSET(sock_common, skc_family);
OFFSET(sock_common, skc_num);
OFFSET(sock_common, skc_rcv_saddr);
OFFSET(sock_common, skc_state);
OFFSET(sock_common, skc_v6_daddr);
OFFSET(sock_common, skc_v6_rcv_saddr);
OFFSET(tcp_timewait_sock, tw_ts_recent_stamp);

SECTION("iter/tcp")
int plain_time_wait(struct tcp_iterator *context)
{
	void *socket = context->socket, *waiting;
	struct record record = {};
	if (!socket || AT(u8, socket, sock_common, skc_state) != TIME_WAIT)
		return 0;
	waiting = as_time_wait(socket);
	if (!waiting || AT(u32, waiting, tcp_timewait_sock, tw_ts_recent_stamp))
		return 0;
	record.port = AT(u16, socket, sock_common, skc_num);
	record.remote_port = AT(u16, socket, sock_common, skc_dport);
	if (AT(u16, socket, sock_common, skc_family) == INET) {
		record.local[2] = record.remote[2] = 0xffff0000;
		record.local[3] = AT(u32, socket, sock_common, skc_rcv_saddr);
		record.remote[3] = AT(u32, socket, sock_common, skc_daddr);
	} else {
		for (int word = 0; word < 4; word++) {
			record.local[word] = *(&AT(u32, socket, sock_common, skc_v6_rcv_saddr) + word);
			record.remote[word] = *(&AT(u32, socket, sock_common, skc_v6_daddr) + word);
		}
	}
	sequence_write(context->meta->sequence, &record, sizeof(record));
	return 0;
}

char terms[] SECTION("license") = "Dual MIT/GPL";
