/* For the test of recursion_misses in tracing.rs: each run of the program causes the event that the program traces once more. */
#include "kernel.h"

/* The same struct is in tracing.rs. */
struct counts {
	u64 runs;
	u64 nested; /* runs within another run: kernels before 6.1 do not skip them */
	u64 inside;
};

struct {
	NUMBER(type, MAP_ARRAY_PER_CPU);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct counts);
} counted SECTION(".maps");

static long (*const read_user)(void *into, u32 size, const void *from) = (void *)112;

SECTION("tp_btf/page_fault_kernel")
int fault(u64 *context)
{
	u32 only = 0;
	u64 unread;
	struct counts *counts = map_lookup(&counted, &only);
	if (!counts)
		return 0;
	if (counts->inside) {
		counts->nested += 1;
		return 0;
	}
	counts->inside = 1;
	counts->runs += 1;
	/* No process has memory at this address, so the kernel takes a page fault. */
	read_user(&unread, sizeof(unread), (void *)sizeof(unread));
	counts->inside = 0;
	return 0;
}

char terms[] SECTION("license") = "Dual MIT/GPL";
