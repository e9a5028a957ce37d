/* SPDX-License-Identifier: Apache-2.0
 *
 * The kill switch's maps: all that user space and the programs have to agree on.
 * The Python side is adapters/linux/bpf_killswitch.py; change both together.
 *
 * A guest is known by its slot. A packet of slot s passes while
 *
 *     now < slots[0].lease  and  now < slots[0].deadline     (all guests)
 *     now < slots[s].lease  and  now < slots[s].deadline     (this guest)
 *
 * where now is CLOCK_BOOTTIME in nanoseconds, so that time spent asleep counts. A fresh map is
 * all zero: shut until someone opens it, and shut again when nobody renews it.
 */
#ifndef RN_KILLSWITCH_H
#define RN_KILLSWITCH_H

#define RN_SLOTS 256 /* slots of 16 bytes: one page, mapped into the guard */
#define RN_ALL 0     /* the slot that rules all guests */
#define RN_LANE 1    /* whatever crosses a guest interface and belongs to no known guest */
#define RN_GONE 255  /* guests that have left: never opened, for what their sockets still hold */
#define RN_CGROUPS 4096 /* guests that are here, and those that left a while ago */
#define RN_FOREIGN 0xffffffff /* on a shared interface: not a guest's, never touched */
#define RN_LEVELS 8  /* how deep below the cgroup root a guest's group may be */

struct rn_slot {
	__u64 lease;    /* renewed again and again; 0 = stop now */
	__u64 deadline; /* only ever moved by the owner's terms; ~0 = none */
};

/* What an interface is: whose packets cross it when the cgroup does not say. */
struct rn_iface {
	__u32 slot; /* a guest's slot, RN_LANE, or RN_FOREIGN */
	__u32 shared; /* 1: look the guest up by the socket's cgroup first */
};

/* Counters: counts[(slot * 2 + direction) * 2 + verdict], one value per CPU. */
#define RN_OUT 0 /* from the guest */
#define RN_IN 1  /* to the guest */
#define RN_PASSED 0
#define RN_DROPPED 1

struct rn_count {
	__u64 packets; /* as on the wire: a GSO packet counts as its segments */
	__u64 bytes;   /* as on the wire: each segment with its headers */
};

/* What an observer has seen last (benches and tests). */
struct rn_seen {
	__u64 last; /* CLOCK_BOOTTIME, ns */
	__u64 packets;
	__u64 bytes;
	__u64 after; /* set by whoever watches: packets from then on are late; 0 = none are */
	__u64 late;
};

#endif
