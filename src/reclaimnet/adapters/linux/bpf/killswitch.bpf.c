/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * The kill switch: drops guest packets once their lease or their deadline is over, with no user
 * space involved. It uses stable kernel interfaces only (__sk_buff and helpers), so it needs
 * neither the running kernel's headers nor libbpf.
 */
#include <linux/bpf.h>
#include "killswitch.h"

#define SEC(name) __attribute__((section(name), used))
#define INLINE static inline __attribute__((always_inline))

#define TC_PASS (-1) /* TC_ACT_UNSPEC: whoever comes next decides */
#define TC_DROP 2    /* TC_ACT_SHOT */
#define ETH_BYTES 14
#define ETH_ARP 0x0806
#define ETH_IP4 0x0800
#define ETH_IP6 0x86dd
#define IP4_BYTES 20
#define IP6_BYTES 40
#define UDP_BYTES 8
#define PROTO_TCP 6

struct map {
	__u32 type, key_size, value_size, max_entries, flags;
};

struct map SEC("maps") rn_slots = {BPF_MAP_TYPE_ARRAY, 4, sizeof(struct rn_slot), RN_SLOTS,
				   BPF_F_MMAPABLE};
struct map SEC("maps") rn_counts = {BPF_MAP_TYPE_PERCPU_ARRAY, 4, sizeof(struct rn_count),
				    RN_SLOTS * 4, 0};
struct map SEC("maps") rn_ifaces = {BPF_MAP_TYPE_HASH, 4, sizeof(struct rn_iface), RN_SLOTS, 0};
struct map SEC("maps") rn_cgroups = {BPF_MAP_TYPE_HASH, 8, 4, RN_CGROUPS, 0}; /* id -> slot */
struct map SEC("maps") rn_seen = {BPF_MAP_TYPE_ARRAY, 4, sizeof(struct rn_seen), 1, BPF_F_MMAPABLE};

static void *(*const lookup)(void *map, const void *key) = (void *)BPF_FUNC_map_lookup_elem;
static __u64 (*const boot_ns)(void) = (void *)BPF_FUNC_ktime_get_boot_ns;
static __u64 (*const skb_ancestor)(void *skb, int level) = (void *)BPF_FUNC_skb_ancestor_cgroup_id;
static __u64 (*const sk_ancestor)(void *sk, int level) = (void *)BPF_FUNC_sk_ancestor_cgroup_id;
static long (*const load_bytes)(const void *skb, __u32 at, void *to, __u32 size) =
	(void *)BPF_FUNC_skb_load_bytes;

/* GSO leaves one set of headers for many segments; the wire carries one for each. `l2` is where the
 * network header starts: after Ethernet for tc, at once for a cgroup. */
INLINE __u64 wire_bytes(struct __sk_buff *skb, __u32 segments, __u32 l2)
{
	__u32 ip = skb->protocol == __builtin_bswap16(ETH_IP6) ? IP6_BYTES : IP4_BYTES;
	__u32 transport = UDP_BYTES;
	__u8 protocol = 0, offset = 0;

	if (segments < 2)
		return skb->len + ETH_BYTES - l2;
	load_bytes(skb, l2 + (ip == IP6_BYTES ? 6 : 9), &protocol, 1);
	if (protocol == PROTO_TCP) {
		load_bytes(skb, l2 + ip + 12, &offset, 1);
		transport = (offset >> 4) * 4;
	}
	return skb->len + ETH_BYTES - l2 +
	       (__u64)(segments - 1) * (ETH_BYTES + ip + transport);
}

INLINE int may_pass(__u32 slot)
{
	struct rn_slot *entry = lookup(&rn_slots, &slot);
	__u64 now = boot_ns();

	return entry && now < *(volatile __u64 *)&entry->lease &&
	       now < *(volatile __u64 *)&entry->deadline;
}

/* 1 if the packet may go on. Counted either way. */
INLINE int judge(struct __sk_buff *skb, __u32 slot, __u32 direction, __u32 l2)
{
	int pass = may_pass(RN_ALL) && may_pass(slot);
	__u32 key = (slot * 2 + direction) * 2 + (pass ? RN_PASSED : RN_DROPPED);
	struct rn_count *count = lookup(&rn_counts, &key);
	__u32 segments = skb->gso_segs;

	if (count) {
		count->packets += segments > 1 ? segments : 1;
		count->bytes += wire_bytes(skb, segments, l2);
	}
	return pass;
}

/* From a guest. The socket is still known one veth further, and with it the cgroup. */
SEC("tc/out") int rn_out(struct __sk_buff *skb)
{
	__u32 index = skb->ifindex, slot;
	struct rn_iface *iface = lookup(&rn_ifaces, &index);

	if (!iface)
		return TC_PASS;
	slot = iface->slot;
	if (iface->shared && skb->protocol == __builtin_bswap16(ETH_ARP)) {
		slot = RN_ALL; /* neighbours are found for all guests, by nobody's socket */
	} else if (iface->shared) {
#pragma unroll
		for (int level = 1; level <= RN_LEVELS; level++) {
			__u64 id = skb_ancestor(skb, level);
			__u32 *found;

			if (!id)
				break;
			found = lookup(&rn_cgroups, &id);
			if (found) {
				slot = *found;
				break;
			}
		}
	}
	if (slot == RN_FOREIGN)
		return TC_PASS;
	return judge(skb, slot, RN_OUT, ETH_BYTES) ? TC_PASS : TC_DROP;
}

/* To a guest. Nobody knows the receiving socket yet, so the interface decides; a guest that shares
 * its interface is told apart by rn_in_cgroup. */
SEC("tc/in") int rn_in(struct __sk_buff *skb)
{
	__u32 index = skb->ifindex;
	struct rn_iface *iface = lookup(&rn_ifaces, &index);

	if (!iface || iface->slot == RN_FOREIGN)
		return TC_PASS;
	if (iface->shared)
		return may_pass(RN_ALL) ? TC_PASS : TC_DROP;
	return judge(skb, iface->slot, RN_IN, ETH_BYTES) ? TC_PASS : TC_DROP;
}

/* To a guest's socket, attached to the guest's cgroup. */
SEC("cgroup_skb/ingress") int rn_in_cgroup(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk;

	if (!sk)
		return 1;
#pragma unroll
	for (int level = 1; level <= RN_LEVELS; level++) {
		__u64 id = sk_ancestor(sk, level);
		__u32 *found;

		if (!id)
			break;
		found = lookup(&rn_cgroups, &id);
		if (found)
			return judge(skb, *found, RN_IN, 0);
	}
	return 1;
}

/* Watches a wire and touches nothing. */
SEC("tc/observe") int rn_observe(struct __sk_buff *skb)
{
	__u32 key = 0;
	struct rn_seen *seen = lookup(&rn_seen, &key);

	if (seen && skb->protocol == __builtin_bswap16(ETH_IP4)) {
		__u64 packets = skb->gso_segs > 1 ? skb->gso_segs : 1, now = boot_ns();
		__u64 after = *(volatile __u64 *)&seen->after;

		seen->last = now;
		__sync_fetch_and_add(&seen->packets, packets);
		if (after && now >= after)
			__sync_fetch_and_add(&seen->late, packets);
		__sync_fetch_and_add(&seen->bytes, wire_bytes(skb, skb->gso_segs, ETH_BYTES));
	}
	return TC_PASS;
}

char SEC("license") rn_license[] = "GPL";
