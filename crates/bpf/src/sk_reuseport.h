/* Kernel declarations for programs of type BPF_PROG_TYPE_SK_REUSEPORT, written from bpf(2), bpf-helpers(7) and the
 * kernel's documentation, so that no kernel header is needed to build them. The layouts are fixed (kernel ABI). */
#pragma once

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long s64;

#define SECTION(name) __attribute__((section(name), used))
#define INLINE static inline __attribute__((always_inline))

enum verdict { PASS = 1 };

/* The context: one packet or, if `migrating` is set, one connection whose listener was closed. The verifier knows the
 * fields by their offsets. */
struct context {
    u8 *data; /* start of the transport header */
    u8 *data_end;
    u32 length;
    u32 ethernet_protocol;
    u32 ip_protocol;
    u32 is_bound_to_any;
    u32 hash;
    u32 hole;
    void *socket;
    void *migrating;
};

/* A map. The loader creates it and fills in its descriptor where the program uses its name. */
struct map;

static void *(*const map_lookup)(struct map *map, const void *key) = (void *)1;
static long (*const select_socket)(struct context *context, struct map *sockets, u32 *key, u64 flags) = (void *)82;
