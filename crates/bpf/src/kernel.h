/* Declarations for tracing programs: helpers, map types, and the fields of kernel structs that the programs read. Only names
 * and types count: the loader takes the offset of a field from the BTF of the running kernel (CO-RE). A struct within an
 * anonymous union is written without the union, because the loader looks through it. */
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int s32;
typedef long long s64;

#define SECTION(name) __attribute__((section(name), used))
#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#define NULL ((void *)0)

/* Maps: the loader reads the numbers out of the types (BTF). */
#define NUMBER(name, value) int (*name)[value]
#define TYPE(name, value) value *name
#define MAP(name, kind, entries, key_type, value_type)                                                                       \
	struct {                                                                                                             \
		NUMBER(type, kind);                                                                                          \
		NUMBER(max_entries, entries);                                                                                \
		TYPE(key, key_type);                                                                                         \
		TYPE(value, value_type);                                                                                     \
	} name SECTION(".maps")
#define RING(name, bytes)                                                                                                    \
	struct {                                                                                                             \
		NUMBER(type, MAP_RING);                                                                                      \
		NUMBER(max_entries, bytes);                                                                                  \
	} name SECTION(".maps"); _Static_assert((bytes) % 65536 == 0, "a ring has whole pages, of up to 64 KiB on arm64")

enum map_kind {
	MAP_HASH = 1,
	MAP_ARRAY = 2,
	MAP_ARRAY_PER_CPU = 6,
	MAP_STACKS = 7,
	MAP_HASH_FORGETFUL = 9,
	MAP_SOCKET_STORAGE = 24,
	MAP_RING = 27,
};
/* BPF_F_NO_PREALLOC, which storage of sockets needs. */
enum { NO_PREALLOCATION = 1 };
/* BPF_ANY and BPF_NOEXIST. */
enum { ANY = 0, NOT_TWICE = 1 };
/* BPF_RB_NO_WAKEUP: an event wakes no thread, because the reader polls the ring at intervals. */
enum { NO_WAKEUP = 1 };

enum family { INET = 2, INET6 = 10 };
enum protocol { TCP = 6, UDP = 17, MPTCP = 262 };
/* include/net/tcp_states.h */
enum tcp_state {
	ESTABLISHED = 1,
	SYN_SENT = 2,
	SYN_RECV = 3,
	FIN_WAIT1 = 4,
	TIME_WAIT = 6,
	CLOSED = 7,
	CLOSE_WAIT = 8,
	LAST_ACK = 9,
	LISTEN = 10,
};

static void *(*const map_lookup)(void *map, const void *key) = (void *)1;
static long (*const map_update)(void *map, const void *key, const void *value, u64 flags) = (void *)2;
static long (*const map_delete)(void *map, const void *key) = (void *)3;
static u64 (*const monotonic_ns)(void) = (void *)5;
static u32 (*const random_u32)(void) = (void *)7;
static u64 (*const current_task_id)(void) = (void *)14;
static long (*const current_name)(void *buffer, u32 size) = (void *)16;
static u64 (*const socket_cookie)(const void *socket) = (void *)46;
static long (*const read_user)(void *into, u32 size, const void *from) = (void *)112;
static long (*const read_kernel)(void *into, u32 size, const void *from) = (void *)113;
/* Returns the value of a socket, or NULL. With MAKE (BPF_SK_STORAGE_GET_F_CREATE), NULL means that there is no memory for it. */
static void *(*const storage_of)(void *map, const void *socket, void *value, u64 flags) = (void *)107;
enum { MAKE = 1 };
/* Returns the id of the stack in the map, or a negative errno. */
static long (*const stack_id)(void *context, void *map, u64 flags) = (void *)27;
/* Copies return addresses, the innermost first. Returns the number of bytes, or a negative errno. */
static long (*const copy_stack)(void *context, void *buffer, u32 size, u64 flags) = (void *)67;
static u64 (*const current_ancestor_cgroup)(int level) = (void *)123;
static void *(*const ring_reserve)(void *ring, u64 size, u64 flags) = (void *)131;
static void (*const ring_submit)(void *event, u64 flags) = (void *)132;

struct ids_in_namespace {
	u32 thread;
	u32 process;
};
static long (*const current_ids_in_namespace)(u64 device, u64 inode, struct ids_in_namespace *ids, u32 size) = (void *)120;

/* Relocations (CO-RE): whether the running kernel has a field, and the size of a struct in bytes. */
#define HAS_FIELD(field) __builtin_preserve_field_info(field, 2)
#define KERNEL_SIZE(type) __builtin_preserve_type_info(*(type *)0, 1)

/* The context of cgroup programs for connect() (include/uapi/linux/bpf.h). It is the same on all kernels, unlike the
 * kernel's internal structs. */
struct bpf_sock {
	u32 bound_dev_if;
	u32 family;
	u32 type;
	u32 protocol;
	u32 mark;
	u32 priority;
	u32 src_ip4;
	u32 src_ip6[4];
	u32 src_port; /* in the machine's byte order; 0: no port yet */
	u16 dst_port; /* in network byte order */
	u16 hole;
	u32 dst_ip4;
	u32 dst_ip6[4];
	u32 state;
};

struct bpf_sock_addr {
	u32 user_family;
	u32 user_ip4;
	u32 user_ip6[4];
	u32 user_port;
	u32 family;
	u32 type;
	u32 protocol;
	u32 msg_src_ip4;
	u32 msg_src_ip6[4];
	u32 hole;
	const struct bpf_sock *sk;
};

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct in6_addr {
	union {
		u8 u6_addr8[16];
		u32 u6_addr32[4];
	} in6_u;
};

typedef struct {
	int counter;
} atomic_t;

typedef struct {
	s64 counter;
} atomic64_t;

struct ns_common {
	unsigned int inum;
};

/* From include/linux/spinlock_types.h. The programs use only the size of this struct and of the buckets. */
struct spinlock {
	u8 unread;
};

struct inet_bind_hashbucket {
	struct spinlock lock;
};

struct inet_listen_hashbucket {
	struct spinlock lock;
};

struct inet_hashinfo {
	struct spinlock *ehash_locks;
	unsigned int ehash_locks_mask;
	struct inet_bind_hashbucket *bhash;
	struct inet_bind_hashbucket *bhash2;
	unsigned int bhash_size;
	unsigned int lhash2_mask;
	struct inet_listen_hashbucket *lhash2;
};

struct inet_timewait_death_row {
	struct inet_hashinfo *hashinfo;
};

struct netns_ipv4 {
	struct inet_timewait_death_row tcp_death_row;
};

struct net {
	struct ns_common ns;
	u32 hash_mix;
	struct netns_ipv4 ipv4;
};

struct nsproxy {
	struct net *net_ns;
};

typedef struct {
	struct net *net;
} possible_net_t;

struct sock_common {
	u32 skc_daddr;
	u32 skc_rcv_saddr;
	u16 skc_dport;
	u16 skc_num;
	unsigned short skc_family;
	volatile unsigned char skc_state;
	possible_net_t skc_net;
	struct in6_addr skc_v6_daddr;
	struct in6_addr skc_v6_rcv_saddr;
	atomic64_t skc_cookie;
};

struct sock_reuseport {
	u16 num_socks;
};

struct socket;

struct sock {
	struct sock_common __sk_common;
	atomic_t sk_drops;
	u16 sk_protocol;
	int sk_err;
	u32 sk_ack_backlog;
	u32 sk_max_ack_backlog;
	struct socket *sk_socket;
	struct sock_reuseport *sk_reuseport_cb;
};

struct socket {
	struct sock *sk;
};

struct file {
	void *private_data;
};

struct fdtable {
	unsigned int max_fds;
	struct file **fd;
};

struct files_struct {
	struct fdtable *fdt;
};

struct io_uring_cqe {
	int res;
};

struct inet_sock {
	u16 inet_sport;
};

struct inet_connection_sock {
	struct inet_sock icsk_inet;
};

struct tcp_sock {
	struct inet_connection_sock inet_conn;
	u32 packets_out;
	u32 srtt_us;
	u32 total_retrans;
	u32 copied_seq;
	u32 rcv_nxt;
	u64 bytes_received;
};

struct sk_buff {
	struct sock *sk;
};

struct flowi_common {
	u8 flowic_proto;
};

union flowi_uli {
	struct {
		u16 dport;
		u16 sport;
	} ports;
};

struct flowi4 {
	struct flowi_common __fl_common;
	u32 daddr;
	union flowi_uli uli;
};

struct flowi6 {
	struct flowi_common __fl_common;
	struct in6_addr daddr;
	union flowi_uli uli;
};

struct pid_namespace {
	struct ns_common ns;
};

struct upid {
	int nr;
	struct pid_namespace *ns;
};

struct pid {
	unsigned int level;
	struct upid numbers[1];
};

struct sched_info {
	u64 run_delay; /* time on a run queue, waiting for a processor */
};

struct task_struct {
	unsigned int __state;
	struct task_struct *group_leader;
	char comm[16];
	struct pid *thread_pid;
	struct nsproxy *nsproxy;
	unsigned long nvcsw;
	unsigned long nivcsw;
	struct sched_info sched_info;
	struct files_struct *files;
};

/* IP_LOCAL_PORT_RANGE, since Linux 6.8 */
struct inet_sock___packed {
	u32 local_port_range;
};

/* before, since Linux 6.3 and in 6.1.y */
struct inet_sock___pair {
	struct {
		u16 lo;
		u16 hi;
	} local_port_range;
};
#pragma clang attribute pop

static struct tcp_sock *(*const as_tcp_socket)(void *socket) = (void *)137;
static struct task_struct *(*const current_task)(void) = (void *)158;
