/* The maps. Sizes are those of src/layout.rs, which sets them when it loads the programs. */
#ifndef KEELSON_MAPS_H
#define KEELSON_MAPS_H

#include "layout.h"

#define SEC(name) __attribute__((section(name), used))
#define INLINE static inline __attribute__((always_inline))

static void *(*const map_lookup)(void *map, const void *key) = (void *)BPF_FUNC_map_lookup_elem;
static long (*const map_update)(void *map, const void *key, const void *value, __u64 flags) =
	(void *)BPF_FUNC_map_update_elem;
static __u64 (*const now_ns)(void) = (void *)BPF_FUNC_ktime_get_ns;
static __u32 (*const random32)(void) = (void *)BPF_FUNC_get_prandom_u32;
static __u64 (*const socket_cookie)(void *ctx) = (void *)BPF_FUNC_get_socket_cookie;
static __u64 (*const netns_cookie)(void *ctx) = (void *)BPF_FUNC_get_netns_cookie;

/* A map as BTF describes it: numbers are lengths of arrays, types are pointers. */
#define NUMBER(name, value) int(*name)[value]
#define TYPE(name, type) typeof(type) *name

#define MAP(map, kind, key_type, value_type, size, options)                    \
	struct {                                                               \
		NUMBER(type, kind);                                            \
		NUMBER(map_flags, options);                                    \
		NUMBER(max_entries, size);                                     \
		TYPE(key, key_type);                                           \
		TYPE(value, value_type);                                       \
	} map SEC(".maps")

/* Written by the proxy. Memory is taken as it is needed, except for slots. */
MAP(frontends, BPF_MAP_TYPE_HASH, struct frontend_key, struct set_key, 1, BPF_F_NO_PREALLOC);
MAP(sets, BPF_MAP_TYPE_HASH, struct set_key, struct set, 1, BPF_F_NO_PREALLOC);
MAP(slots, BPF_MAP_TYPE_ARRAY, __u32, struct slot, 1, 0);
MAP(members, BPF_MAP_TYPE_HASH, struct member_key, __u32, 1, BPF_F_NO_PREALLOC);
MAP(node_addresses, BPF_MAP_TYPE_HASH, struct address, __u32, 1, BPF_F_NO_PREALLOC);

/* Written by the programs. When one is full, the kernel forgets what was used least recently. */
MAP(affinity, BPF_MAP_TYPE_LRU_HASH, struct affinity_key, struct affinity, 1, 0);
MAP(udp_flows, BPF_MAP_TYPE_LRU_HASH, struct flow_key, struct flow, 1, 0);
MAP(udp_replies, BPF_MAP_TYPE_LRU_HASH, struct flow_key, struct flow, 1, 0);
MAP(tcp_peers, BPF_MAP_TYPE_LRU_HASH, struct flow_key, struct flow, 1, 0);
MAP(counters, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, __u64, COUNTERS, 0);

INLINE void count(__u32 counter)
{
	__u64 *value = map_lookup(&counters, &counter);
	if (value)
		*value += 1;
}

#endif
