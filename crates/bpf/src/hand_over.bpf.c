/* Makes no selection, so the kernel's hash chooses. A program of type BPF_SK_REUSEPORT_SELECT_OR_MIGRATE on the group lets the
 * kernel move the connections of a closed listener to the other listeners of the group. Without such a program the kernel
 * resets them (inet_csk_listen_stop). */
#include "sk_reuseport.h"

SECTION("sk_reuseport/migrate")
enum verdict hand_over(struct context *context)
{
    return PASS;
}
