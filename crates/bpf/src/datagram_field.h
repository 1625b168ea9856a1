/* Reads numbers out of datagrams and their headers, and recognises control packets, in programs of type
 * BPF_PROG_TYPE_SK_REUSEPORT. */
#pragma once
#include "sk_reuseport.h"

typedef unsigned short u16;

/* Size of the UDP header, at which the packet starts for this program. */
#define UDP_HEADER 8
#define SWAPPED(number) ((u16)__builtin_bswap16(number))
#define IPV4 SWAPPED(0x0800)
/* The value of BPF_HDR_START_NET: offsets count from the network header. */
#define FROM_NETWORK 1

enum rule { BY_HASH = 0, AT_RANDOM = 1, BY_KEY = 2, BY_PROCESSOR = 3 };
enum control { NOTHING = 0, BY_BYTES = 1, BY_HOPS = 2, BY_SOURCE_PORT = 3, BY_NEIGHBOUR = 4 };

static u32 (*const random_u32)(void) = (void *)7;
static u32 (*const processor)(void) = (void *)8;
static long (*const load)(struct context *context, u32 offset, void *to, u32 length) = (void *)26;
static long (*const load_from)(struct context *context, u32 offset, void *to, u32 length, u32 from) = (void *)68;

/* Reads from the packet, counted from the UDP header. Returns false if the packet is too short. */
INLINE int number_at(struct context *context, u32 offset, u32 width, u32 *number)
{
    if (width == 4) {
        u32 word = 0;
        if (load(context, offset, &word, 4))
            return 0;
        *number = __builtin_bswap32(word);
    } else if (width == 2) {
        u16 half = 0;
        if (load(context, offset, &half, 2))
            return 0;
        *number = SWAPPED(half);
    } else {
        u8 byte = 0;
        if (load(context, offset, &byte, 1))
            return 0;
        *number = byte;
    }
    return 1;
}

INLINE u32 width_of(u64 word) { return word >> 8 & 0xff; }
INLINE u32 offset_of(u64 word) { return word >> 16 & 0xffff; }
INLINE u32 mask_of(u64 word) { return word >> 32; }

INLINE int hops_are(struct context *context, u32 value)
{
    u8 hops = 0;
    u32 offset = (u16)context->ethernet_protocol == IPV4 ? 8 : 7;
    return !load_from(context, offset, &hops, 1, FROM_NETWORK) && hops == value;
}

INLINE int is_control(struct context *context, u64 control, u32 value)
{
    u32 number = 0;
    switch (control & 0xff) {
    case BY_NEIGHBOUR:
        if (!hops_are(context, 255))
            return 0;
        /* fall through */
    case BY_BYTES:
        return number_at(context, UDP_HEADER + offset_of(control), width_of(control), &number) &&
               (number & mask_of(control)) == value;
    case BY_HOPS:
        return hops_are(context, value);
    case BY_SOURCE_PORT:
        return number_at(context, 0, 2, &number) && number == value;
    default:
        return 0;
    }
}

/* Returns the number that selects the place of a packet, by a rule or by the hash for other values. */
INLINE u32 number_of(struct context *context, u64 rule)
{
    u32 number = 0;
    switch (rule & 0xff) {
    case AT_RANDOM:
        return random_u32();
    case BY_KEY:
        return number_at(context, UDP_HEADER + offset_of(rule), width_of(rule), &number) ? number & mask_of(rule) : 0;
    case BY_PROCESSOR:
        return processor();
    default:
        return context->hash;
    }
}
