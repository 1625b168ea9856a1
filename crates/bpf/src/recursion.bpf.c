/* For the test of recursion_misses in tracing.rs: each run of the program causes the event that the program traces once more. */
#include "kernel.h"

/* The same struct is in tracing.rs. */
struct counts {
	u64 runs;
	u64 nested; /* runs within another run: kernels before 6.1 do not skip them */
	u64 inside;
};

MAP(counted, MAP_ARRAY_PER_CPU, 1, u32, struct counts);

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
