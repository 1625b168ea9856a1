/* Comparisons without branches, for loops over the sockets of a group.
 *
 * The verifier follows every branch in every turn of a loop and keeps the state of the best socket on each, so a loop with branches
 * exceeds its limits. These functions compare numbers below 2^63 by the sign of their difference. The barriers keep the compiler from
 * turning them into branches: the first one for numbers whose sign follows from a comparison, as that of -x from x != 0. */
#pragma once
#include "sk_reuseport.h"

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
