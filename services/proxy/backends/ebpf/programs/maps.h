/* The maps that the programs of the socket level write, besides those of Services. */
#ifndef KEELSON_MAPS_H
#define KEELSON_MAPS_H

#include "services.h"

static __u64 (*const now_ns)(void) = (void *)BPF_FUNC_ktime_get_ns;
static __u64 (*const socket_cookie)(void *ctx) = (void *)BPF_FUNC_get_socket_cookie;
static __u64 (*const netns_cookie)(void *ctx) = (void *)BPF_FUNC_get_netns_cookie;

/* When one is full, the kernel forgets what was used least recently. */
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

/* A protocol has eight bits in the maps and nine in the kernel: 0 for those without frontends here. */
INLINE __u8 protocol_of(struct bpf_sock_addr *ctx)
{
	return ctx->protocol == TCP || ctx->protocol == UDP ? ctx->protocol : 0;
}

#endif
