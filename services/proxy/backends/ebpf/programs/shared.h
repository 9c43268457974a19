/* Maps of direct return and of pod devices that the programs of both use, where both are on. Where only one is, the maps of the
 * other are its own, and empty. Sizes are those of src/layout.rs. */
#ifndef KEELSON_SHARED_H
#define KEELSON_SHARED_H

#include "direct/layout.h"
#include "kernel.h"
#include "pods/layout.h"

static __u64 (*const coarse_now_ns)(void) = (void *)BPF_FUNC_ktime_get_coarse_ns;
static long (*const check_mtu)(void *skb, __u32 device, __u32 *mtu, __s32 difference, __u64 flags) =
	(void *)BPF_FUNC_check_mtu;
/* Offered to programs with a license that is compatible with the GPL. */
static long (*const fib_lookup)(void *ctx, struct bpf_fib_lookup *params, int size, __u32 flags) =
	(void *)BPF_FUNC_fib_lookup;
static long (*const redirect_neigh)(__u32 device, struct bpf_redir_neigh *params, int size, __u64 flags) =
	(void *)BPF_FUNC_redirect_neigh;
static long (*const redirect_peer)(__u32 device, __u64 flags) = (void *)BPF_FUNC_redirect_peer;

/* Written by the proxy: the devices of direct return, and, by family, IPv4 and IPv6, the networks of pods. */
MAP(devices, BPF_MAP_TYPE_HASH, __u32, struct device, 1, BPF_F_NO_PREALLOC);
MAP(pod_networks, BPF_MAP_TYPE_ARRAY, __u32, struct pod_network, 2, 0);

/* Written by the programs of direct return; the proxy deletes what has ended. When it is full, new flows are left. */
MAP(direct_replies, BPF_MAP_TYPE_HASH, struct direct_key, struct direct_reply, 1, 0);
/* Written by the programs. When it is full, the kernel forgets what was used least recently. */
MAP(pods, BPF_MAP_TYPE_LRU_HASH, struct address, struct pod, 1, 0);

#define PACKET_TO_THIS_HOST 0

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define ORDER16(value) ((__u16)__builtin_bswap16(value))
#else
#define ORDER16(value) ((__u16)(value))
#endif

#define MORE_FRAGMENTS 0x2000
#define FRAGMENT_OFFSET 0x1fff
#define FRAGMENT6_OFFSET 0xfff8
#define NEXT_FRAGMENT 44

enum fragment {
	WHOLE,
	FIRST_FRAGMENT,
	LATER_FRAGMENT,
};

/* The header of a fragment of IPv6. */
struct fragment6 {
	__u8 next, zero;
	__be16 place;
	__u32 id;
};

/* A pod that has not sent anything for as long as this is not known any more. */
#define KNOWN_FOR NANOSECONDS

#endif
