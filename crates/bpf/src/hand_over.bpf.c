/* Chooses nothing: the kernel's hash does. What counts is that it is there and was loaded as
 * BPF_SK_REUSEPORT_SELECT_OR_MIGRATE: for the kernel this is leave to give the connections of a listener that goes away
 * to the others of the group, where it resets them otherwise (inet_csk_listen_stop). */
#include "sk_reuseport.h"

SECTION("sk_reuseport/migrate")
enum verdict hand_over(struct context *context)
{
    return PASS;
}
