/* Helpers and maps of direct return, besides those of ../shared.h. Sizes are those of src/direct/layout.rs. */
#ifndef KEELSON_DIRECT_MAPS_H
#define KEELSON_DIRECT_MAPS_H

#include "../services.h"
#include "../shared.h"

static long (*const skb_load_bytes)(const void *skb, __u32 at, void *to, __u32 size) = (void *)BPF_FUNC_skb_load_bytes;
static long (*const skb_store_bytes)(void *skb, __u32 at, const void *from, __u32 size, __u64 flags) =
	(void *)BPF_FUNC_skb_store_bytes;
static long (*const skb_adjust_room)(void *skb, __s32 difference, __u32 mode, __u64 flags) =
	(void *)BPF_FUNC_skb_adjust_room;
static long (*const l4_csum_replace)(void *skb, __u32 at, __u64 from, __u64 to, __u64 flags) =
	(void *)BPF_FUNC_l4_csum_replace;
static __s64 (*const csum_diff)(void *from, __u32 from_size, void *to, __u32 to_size, __u32 seed) =
	(void *)BPF_FUNC_csum_diff;
static long (*const xdp_load_bytes)(void *xdp, __u32 at, void *to, __u32 size) = (void *)BPF_FUNC_xdp_load_bytes;
static long (*const xdp_store_bytes)(void *xdp, __u32 at, void *from, __u32 size) = (void *)BPF_FUNC_xdp_store_bytes;
static long (*const xdp_adjust_head)(void *xdp, int difference) = (void *)BPF_FUNC_xdp_adjust_head;
static __u64 (*const xdp_get_buff_len)(void *xdp) = (void *)BPF_FUNC_xdp_get_buff_len;
static long (*const redirect)(__u32 device, __u64 flags) = (void *)BPF_FUNC_redirect;

/* Written by the proxy. */
MAP(networks, BPF_MAP_TYPE_LPM_TRIE, struct network_key, __u32, 1, BPF_F_NO_PREALLOC);
MAP(source_ranges, BPF_MAP_TYPE_LPM_TRIE, struct range_key, __u32, 1, BPF_F_NO_PREALLOC);

/* Written by the programs; of flows, the proxy deletes what has ended. When it is full, new flows are left. */
MAP(direct_flows, BPF_MAP_TYPE_HASH, struct direct_key, struct direct_flow, 1, 0);
/* Written by the programs. When it is full, the kernel forgets what was used least recently. */
MAP(reply_fragments, BPF_MAP_TYPE_LRU_HASH, struct fragment_key, struct address, 1, 0);
MAP(direct_counters, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, __u64, DIRECT_COUNTERS, 0);

INLINE void count(__u32 counter)
{
	__u64 *value = map_lookup(&direct_counters, &counter);
	if (value)
		*value += 1;
}

/* What the network of an address has; 0: it is outside of the cluster. */
INLINE __u32 find_network(const struct address *address)
{
	struct network_key key = {.bits = 128, .address = *address};
	__u32 *found = map_lookup(&networks, &key);
	return found ? *found : 0;
}

/* Whether the client may use a frontend, by its source ranges. */
INLINE int is_admitted(const struct set_key *frontend, const struct address *client)
{
	if (!(frontend->kind & HAS_RANGES))
		return 1;
	struct range_key key = {.bits = 32 + 128, .number = frontend->number, .address = *client};
	return map_lookup(&source_ranges, &key) != 0;
}

#endif
