/* Writes a record for each descriptor of an IPv4 or IPv6 socket, or of a listening or connected unix socket, in the network namespace of the reading process, to that process.
 *
 * The loader replaces offset_of__STRUCT__FIELD by the offset of the field in the running kernel: a full relocation (CO-RE) takes longer
 * than the whole pass. */
#include "socket_holders.h"

/* The context of iterators (include/linux/bpf.h): the same on all kernels. */
struct iterator_meta {
	void *sequence;
};

struct task_file {
	struct iterator_meta *meta;
	void *task;
	u64 descriptor;
	void *file;
};

static long (*const sequence_write)(void *into, const void *bytes, u32 size) = (void *)127;
static void *(*const socket_of_file)(void *file) = (void *)162;

/* Beside the families of kernel.h. */
enum { UNIX = 1 };

#define OFFSET(structure, field) extern const char offset_of__##structure##__##field[]
#define AT(type, pointer, structure, field) (*(type *)((char *)(pointer) + (u64)offset_of__##structure##__##field))

OFFSET(file, f_inode);
OFFSET(inode, i_ino);
OFFSET(sock, sk_protocol);
OFFSET(socket, sk);
OFFSET(sock_common, skc_family);
OFFSET(sock_common, skc_net);
OFFSET(sock_common, skc_num);
OFFSET(sock_common, skc_rcv_saddr);
OFFSET(sock_common, skc_state);
OFFSET(sock_common, skc_v6_rcv_saddr);
OFFSET(task_struct, nsproxy);
OFFSET(task_struct, tgid);
OFFSET(nsproxy, net_ns);

SECTION("iter/task_file")
int socket_holders(struct task_file *context)
{
	void *task = context->task;
	void *file = context->file;
	struct holder holder = {};
	void *socket, *own, *inode, *proxy;
	if (!task || !file)
		return 0;
	socket = socket_of_file(file);
	if (!socket)
		return 0;
	own = AT(void *, socket, socket, sk);
	if (!own)
		return 0;
	holder.family = AT(u16, own, sock_common, skc_family);
	holder.state = AT(u8, own, sock_common, skc_state);
	if (holder.family != INET && holder.family != INET6 &&
	    (holder.family != UNIX || (holder.state != LISTEN && holder.state != ESTABLISHED)))
		return 0;
	proxy = AT(void *, current_task(), task_struct, nsproxy);
	if (!proxy || AT(void *, own, sock_common, skc_net) != AT(void *, proxy, nsproxy, net_ns))
		return 0;
	inode = AT(void *, file, file, f_inode);
	holder.inode = AT(u64, inode, inode, i_ino);
	holder.process = AT(u32, task, task_struct, tgid);
	/* In a cache line that the program does not need otherwise. */
	if (holder.state == CLOSED)
		holder.protocol = AT(u16, own, sock, sk_protocol);
	if (holder.family != UNIX)
		holder.port = AT(u16, own, sock_common, skc_num);
	if (holder.family == INET) {
		holder.address[2] = 0xffff0000;
		holder.address[3] = AT(u32, own, sock_common, skc_rcv_saddr);
	} else if (holder.family == INET6) {
		for (int word = 0; word < 4; word++)
			holder.address[word] = *(&AT(u32, own, sock_common, skc_v6_rcv_saddr) + word);
	}
	sequence_write(context->meta->sequence, &holder, sizeof(holder));
	return 0;
}

char terms[] SECTION("license") = "Dual MIT/GPL";
