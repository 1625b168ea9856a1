/* Kernel declarations for XDP programs, written from bpf(2) and bpf-helpers(7) (fixed ABI), and the function that finds the
 * packets for a group of UDP sockets. */
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define SECTION(name) __attribute__((section(name), used))
#define INLINE static inline __attribute__((always_inline))

enum action { PASS = 2 };

/* The context of an XDP program. The verifier knows the fields by their offsets. */
struct context {
    u32 data;
    u32 data_end;
    u32 data_meta;
    u32 ingress_ifindex;
    u32 queue;
};

/* A map. The loader creates it and fills in its descriptor where the program uses its name. */
struct map;

static void *(*const map_lookup)(struct map *map, const void *key) = (void *)1;
static u32 (*const random_u32)(void) = (void *)7;
static u32 (*const processor)(void) = (void *)8;
static long (*const redirect_to)(struct map *map, u64 key, u64 flags) = (void *)51;

#define SWAPPED(number) ((u16)__builtin_bswap16(number))
#define IPV4 SWAPPED(0x0800)
#define IPV6 SWAPPED(0x86dd)
#define TAG SWAPPED(0x8100)          /* 802.1Q */
#define PROVIDER_TAG SWAPPED(0x88a8) /* 802.1ad */
#define MORE_OR_OFFSET SWAPPED(0x3fff)
#define UDP 17

enum families { ANY_IPV4 = 1, ANY_IPV6 = 2, ONE_IPV4 = 4, ONE_IPV6 = 8 };

/* The destination of the packets that a program handles, in network byte order. */
struct target {
    u32 families;
    u32 port;
    u32 address[4];
};

/* The counters of one processor, on a cache line of its own. */
struct counts {
    volatile u64 changed;
    volatile u64 passed;
    u64 room[6];
};
#define PROCESSORS 512

/* Returns the complete UDP header of a packet to the target, or 0 for other packets, for fragments (only the first fragment has
 * ports) and for IPv6 with extension headers. */
INLINE u8 *udp_to(struct context *context, struct target *target, int *is_ipv4)
{
    u8 *at = (u8 *)(u64)context->data;
    u8 *end = (u8 *)(u64)context->data_end;
    if (at + 14 > end)
        return 0;
    u16 protocol = *(u16 *)(at + 12);
    at += 14;
#pragma clang loop unroll(full)
    for (int tags = 0; tags < 2; tags++) {
        if (protocol != TAG && protocol != PROVIDER_TAG)
            break;
        if (at + 4 > end)
            return 0;
        protocol = *(u16 *)(at + 2);
        at += 4;
    }
    if (protocol == IPV4) {
        if (at + 20 > end || at[0] >> 4 != 4 || at[9] != UDP || *(u16 *)(at + 6) & MORE_OR_OFFSET)
            return 0;
        if (!(target->families & ANY_IPV4)) {
            if (!(target->families & ONE_IPV4) || *(u32 *)(at + 16) != target->address[0])
                return 0;
        }
        u32 length = (at[0] & 15) * 4;
        if (length < 20)
            return 0;
        at += length;
        *is_ipv4 = 1;
    } else if (protocol == IPV6) {
        if (at + 40 > end || at[0] >> 4 != 6 || at[6] != UDP)
            return 0;
        if (!(target->families & ANY_IPV6)) {
            u32 *address = (u32 *)(at + 24);
            if (!(target->families & ONE_IPV6) || address[0] != target->address[0] || address[1] != target->address[1] ||
                address[2] != target->address[2] || address[3] != target->address[3])
                return 0;
        }
        at += 40;
        *is_ipv4 = 0;
    } else {
        return 0;
    }
    if (at + 8 > end || *(u16 *)(at + 2) != (u16)target->port)
        return 0;
    return at;
}
