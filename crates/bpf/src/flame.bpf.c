/* Where programs are in the kernel while they run: called by the clock of each processor, it counts stacks by process.
 *
 * Everything is counted here: which stacks there are the map of stacks knows, and how often the map of counts. */
#include "counting.h"

/* The same numbers and structs are in flame.rs. A stack has a place by its hash: many places, so that two rarely want one. */
enum { STACKS = 16384, FRAMES = 127, COUNTS = 16384 };
enum { MAP_STACKS = 7 };
enum flags { HAS_PROCESS = 1, HAS_NAME = 2, HAS_CGROUP = 4 };
/* What bpf_get_stackid says when another stack has the place. */
enum { EEXIST = 17 };
/* In place of a stack: the program itself ran. */
enum { IN_PROGRAM = 0xffffffff };

static long (*const stack_id)(void *context, void *map, u64 flags) = (void *)27;

/* What to sample; unset fields are not looked at. */
struct wanted {
	u64 cgroup;
	u64 namespace_device;
	u64 namespace_inode;
	u32 flags;
	u32 process;
	u8 name[16];
};

struct place {
	u8 name[16];
	u32 process;
	u32 stack;
};

struct sums {
	u64 samples;
	u64 lost;
};

LAYOUT(struct wanted, 48);
LAYOUT(struct place, 24);
LAYOUT(struct sums, 16);

struct {
	NUMBER(type, MAP_ARRAY);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct wanted);
} settings SECTION(".maps");

struct {
	NUMBER(type, MAP_ARRAY);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct sums);
} sums SECTION(".maps");

struct stack {
	u64 frames[FRAMES];
};

struct {
	NUMBER(type, MAP_STACKS);
	NUMBER(max_entries, STACKS);
	TYPE(key, u32);
	TYPE(value, struct stack);
} stacks SECTION(".maps");

struct {
	NUMBER(type, MAP_HASH);
	NUMBER(max_entries, COUNTS);
	TYPE(key, struct place);
	TYPE(value, u64);
} counts SECTION(".maps");

SECTION("perf_event") int sample(void *context)
{
	u32 only = 0;
	u64 one = 1;
	u64 *count;
	long id;
	struct place place = {};
	struct wanted *wanted = map_lookup(&settings, &only);
	struct sums *all = map_lookup(&sums, &only);
	/* Number 0 is a processor without anything to do. */
	if (!wanted || !all || !(current_task_id() >> 32))
		return 0;
	place.process = current_process(wanted->namespace_device, wanted->namespace_inode);
	if (wanted->flags & HAS_PROCESS && wanted->process != place.process)
		return 0;
	current_name(place.name, sizeof(place.name));
	if (wanted->flags & HAS_NAME && !same_16(wanted->name, place.name))
		return 0;
	if (wanted->flags & HAS_CGROUP && !is_in_cgroup(wanted->cgroup))
		return 0;
	id = stack_id(context, &stacks, 0);
	if (id == -EEXIST) {
		ADD(all->lost, 1);
		return 0;
	}
	place.stack = id < 0 ? IN_PROGRAM : (u32)id;
	count = map_lookup(&counts, &place);
	if (!count) {
		/* Another processor may have been first. */
		u64 none = 0;
		map_update(&counts, &place, &none, NOT_TWICE);
		count = map_lookup(&counts, &place);
	}
	if (!count) {
		ADD(all->lost, 1);
		return 0;
	}
	ADD(*count, one);
	ADD(all->samples, one);
	return 0;
}

char terms[] SECTION("license") = "Dual MIT/GPL";
