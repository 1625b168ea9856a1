/* The layouts that fix_accept.bpf.c and fix_accept_counts.bpf.c share. The same layouts are in fix_accept.rs. */
#pragma once

/* The greatest number of listeners at a time, and of listeners of one group. Powers of two. */
#define LISTENERS 4096
#define MEMBERS 1024

/* A listener, or a UDP socket of a group. On a cache line of its own. */
struct listener {
	volatile u64 socket;	 /* kernel address of the socket; 0: closed, or the entry is free */
	volatile u64 queue_at;	 /* kernel address of the queue length: connections (32 bits), or bytes for UDP */
	volatile u64 young_at;	 /* kernel address of the number of handshakes in progress (32 bits) */
	volatile u64 open;	 /* connections that entered the queue and were not closed */
	volatile u64 chosen;	 /* connections or datagrams that the selector sent here */
	volatile u64 connections; /* connections that entered the queue */
	volatile u32 generation; /* changes when the entry gets another socket */
	volatile u32 mean_us;	 /* moving average of the time between two such events of a busy worker as in progress_ns */
	/* Time (CLOCK_MONOTONIC) at which the worker last closed a connection, or got the first one after it had none. */
	volatile u64 progress_ns;
};

struct everything {
	volatile u64 beat_ns; /* CLOCK_MONOTONIC at the last heartbeat of the attaching process */
	u64 room[7];
	struct listener listener[LISTENERS];
};
