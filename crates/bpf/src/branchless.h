/* Comparisons without branches. The includer has the types.
 *
 * The verifier follows every branch in every turn of a loop, with another state on each: of the best socket of a group, or of a search for
 * a port. A loop with branches exceeds its limits, or takes seconds to check. The barriers keep the compiler from turning these functions
 * into branches. */
#pragma once

/* Returns whether no bit is set. Words are equal if the bits in which they differ are none. */
INLINE int is_zero(u32 bits)
{
    asm volatile("" : "+r"(bits));
    return !bits;
}

/* For numbers below 2^63, which are compared by the sign of their difference. The first barrier is for numbers whose sign follows from a
 * comparison, as that of -x from x != 0. */
INLINE s64 all_ones_if_negative(s64 number)
{
    asm volatile("" : "+r"(number));
    s64 mask = number >> 63;
    asm volatile("" : "+r"(mask));
    return mask;
}

INLINE s64 lower(s64 a, s64 b)
{
    s64 difference = a - b;
    return b + (difference & all_ones_if_negative(difference));
}
