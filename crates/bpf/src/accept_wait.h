/* The counts of accept_wait.bpf.c and their maps. */
#pragma once
#include "counting.h"

/* The same numbers and structs are in accept_wait.rs. */
enum { SOCKETS = 131072, LISTENERS = 512, WORKERS = 2048, TASKS = 16384 };
enum { EINTR = 4, EAGAIN = 11, RESTART = 512 /* and greater: the call is repeated after a signal */ };
/* The kernel stores the duration of the handshake (srtt_us) in eighths of a microsecond. */
enum { SRTT_SHIFT = 3 };

/* What to trace; unset fields are not looked at. */
struct wanted {
	u64 cgroup;
	u64 namespace_device;
	u64 namespace_inode;
	u32 flags;
	u32 process;
	u8 name[16];
	u8 address[16];
	u16 port;
	u16 hole;
	u32 network; /* inode of the network namespace */
};

/* The key is the cookie of the socket, which is unique on this host. */
struct listener {
	u64 socket; /* kernel address of the socket; 0: closed */
	u64 drops;  /* sk_drops at the last look */
	u64 queued;
	u64 depth_sum;
	u64 full;           /* connections after which the queue had no room left */
	u64 full_drops;     /* growth of sk_drops while the queue was full */
	u64 other_drops;    /* growth of sk_drops while the queue had room */
	u64 refused_acks;   /* final ACKs dropped because the queue was full: each counts twice in sk_drops */
	u64 retried;        /* handshakes whose SYN-ACK was retransmitted, so that their time is not known */
	u64 accepted;       /* by any task */
	u64 never_accepted; /* closed before accept() */
	u64 unseen;         /* accepted without a report of any hook */
	u64 closed_by_peer;
	u64 reset;
	u64 turned_away; /* closed by this side in their first second, with nothing read */
	u32 depth_max;
	u32 backlog;
	u32 network; /* inode of its namespace */
	u32 was_full;
	u16 port;
	u16 group; /* sockets of its SO_REUSEPORT group; 0: no group */
	u32 hole;
	u8 address[16];
	u64 handshake_ns;
	u64 handshake_max_ns;
	u32 handshakes[COARSE];
	struct histogram wait; /* of the accepts that the filter selects */
};

struct worker_key {
	u64 listener;
	u32 thread;
	u32 process;
};

struct worker {
	u8 name[16];
	u64 accepts;
	u64 wait_ns;
	u64 wait_max_ns;
	u64 open;
	u64 reads;  /* number of times that data arrived for its connections */
	u64 empty;  /* calls of accept() that returned EAGAIN */
	u64 woken;  /* calls in `empty` after a spurious wakeup */
	u64 closed; /* connections that it closed before the peer did */
	u64 failed; /* calls of accept() with another error than EAGAIN */
	u32 error;  /* the last of these errors */
	u32 hole;
	u32 waits[COARSE];
};

struct totals {
	u64 lost_sockets;
	u64 lost_listeners;
	u64 lost_workers;
	u64 unmatched; /* established, but no listener was seen for them */
	u64 earlier;   /* accepted, but queued before the trace began */
	u64 unseen;
	u64 other_tasks; /* accepted by tasks that the filter excludes */
	u64 seeded;	 /* listeners that were there before the trace */
	u64 mptcp;	 /* listeners of MPTCP in the selected namespaces */
	struct histogram wait;
	struct histogram handshake;
};

/* The state of a connection. Several processors set these marks in any order. Without a mark it is in the accept queue. */
enum marks {
	ACCEPTED = 1,
	ENDED = 2,
	TAKEN = 4, /* out of the queue, but no hook has reported the accept yet */
};
struct connection {
	u64 established_ns;
	struct worker_key worker; /* thread and process are set at the accept */
	u32 reads;		  /* reads not yet added to a worker */
	u32 marks;
	u32 port; /* local port, the same as the listener's */
	u32 hole;
};

/* The connection that has just been established on this processor. */
struct fresh {
	u64 socket;
	u64 at_ns;
	u64 network;
	u32 srtt;
	u32 retries;
	u32 reads;
	u32 port;
};

struct task {
	u8 has_waited;
	u8 has_accepted;
};

LAYOUT(struct wanted, 72);
LAYOUT(struct listener, 176 + 4 * COARSE + sizeof(struct histogram));
LAYOUT(struct worker_key, 16);
LAYOUT(struct worker, 96 + 4 * COARSE);
LAYOUT(struct totals, 72 + 2 * sizeof(struct histogram));
LAYOUT(struct connection, 40);
LAYOUT(struct fresh, 40);

MAP(settings, MAP_ARRAY, 1, u32, struct wanted);
MAP(sums, MAP_ARRAY, 1, u32, struct totals);

/* Zeroes: they are too long for the stack. */
MAP(blank_listener, MAP_ARRAY, 1, u32, struct listener);

MAP(blank_worker, MAP_ARRAY, 1, u32, struct worker);
MAP(listeners, MAP_HASH, LISTENERS, u64, struct listener);
MAP(workers, MAP_HASH, WORKERS, struct worker_key, struct worker);
MAP(connections, MAP_HASH, SOCKETS, u64, struct connection);
MAP(latest, MAP_ARRAY_PER_CPU, 1, u32, struct fresh);
MAP(tasks, MAP_HASH_FORGETFUL, TASKS, u64, struct task);
