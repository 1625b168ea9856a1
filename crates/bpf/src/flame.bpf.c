/* Samples where processes run in the kernel: a clock event of each processor runs the program, which counts stacks by process.
 *
 * The program counts everything itself: one map has the stacks, another map has the counts. */
#include "counting.h"

/* The same numbers and structs are in flame.rs. A hash gives each stack its slot; many slots make collisions rare. */
enum { STACKS = 16384, FRAMES = 127, COUNTS = 32768 };
/* The error of bpf_get_stackid when another stack has the slot. */
enum { EEXIST = 17 };
/* Special values of `callers`: the stack has no callers; the map had no room for them. */
#define NO_CALLERS 0xffffffffU
#define NO_ROOM 0xfffffffeU

static long (*const stack_of)(void *context, void *frames, u32 size, u64 flags) = (void *)67;

/* What to sample; unset fields are not looked at. */
struct wanted {
	u64 cgroup;
	u64 namespace_device;
	u64 namespace_inode;
	u32 flags;
	u32 process;
	u8 name[16];
	u32 network; /* inode of a network namespace */
	u32 hole;
};

/* The innermost address differs from sample to sample, but its callers repeat. Stored separately, they form only a few
 * different stacks. */
struct place {
	u8 name[16];
	u64 innermost; /* 0: the process ran in user space */
	u32 process;
	u32 callers;
};


LAYOUT(struct wanted, 56);
LAYOUT(struct place, 32);

MAP(settings, MAP_ARRAY, 1, u32, struct wanted);

/* Samples for which the map of counts had no room. */
MAP(lost, MAP_ARRAY, 1, u32, u64);

struct stack {
	u64 frames[FRAMES];
};

MAP(stacks, MAP_STACKS, STACKS, u32, struct stack);
MAP(counts, MAP_HASH, COUNTS, struct place, u64);

SECTION("perf_event") int sample(void *context)
{
	u32 only = 0;
	u64 *count;
	long id;
	struct place place = {};
	struct wanted *wanted = map_lookup(&settings, &only);
	u64 *lost_counts = map_lookup(&lost, &only);
	/* Process 0 is the idle task of a processor. */
	if (!wanted || !lost_counts || !(current_task_id() >> 32))
		return 0;
	place.process = current_process(wanted->namespace_device, wanted->namespace_inode);
	if (wanted->flags & HAS_PROCESS && wanted->process != place.process)
		return 0;
	current_name(place.name, sizeof(place.name));
	if (wanted->flags & HAS_NAME && !has_name(wanted->name))
		return 0;
	if (!is_wanted_network(wanted->flags, wanted->network, current_network()))
		return 0;
	if (wanted->flags & HAS_CGROUP && !is_in_cgroup(wanted->cgroup))
		return 0;
	place.callers = NO_CALLERS;
	if (stack_of(context, &place.innermost, sizeof(place.innermost), 0) == sizeof(place.innermost)) {
		id = stack_id(context, &stacks, 1);
		if (id >= 0 || id == -EEXIST)
			place.callers = id >= 0 ? (u32)id : NO_ROOM;
	}
	count = map_lookup(&counts, &place);
	if (!count) {
		/* Another processor may have been first. */
		u64 none = 0;
		map_update(&counts, &place, &none, NOT_TWICE);
		count = map_lookup(&counts, &place);
	}
	if (!count) {
		ADD(*lost_counts, 1);
		return 0;
	}
	ADD(*count, 1);
	return 0;
}

char terms[] SECTION("license") = "Dual MIT/GPL";
