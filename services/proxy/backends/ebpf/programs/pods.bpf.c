/* The program at the devices of pods, one object. build.rs compiles it; docs/ebpf.md describes it.
 *
 * In: what a pod sends. Packets of TCP and UDP to another pod of the node go to that pod's own device, without the routes, rules and
 * devices of the node in between. Everything else goes on to the kernel as it is: nothing is dropped.
 *
 * Where a pod is, its own packets tell: their source is accepted where the routes of the node lead to this device and hardware
 * address. So a pod that uses the address of another one is left to the kernel. */
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>

#include "kernel.h"
#include "pods/layout.h"

/* bpf_fib_lookup asks for a license that is compatible with the GPL. What this object is made of is therefore available under
 * MIT and GPL-2.0 as well. */
const char program_license[] SEC("license") = "Dual MIT/GPL";

static __u64 (*const coarse_now_ns)(void) = (void *)BPF_FUNC_ktime_get_coarse_ns;
static long (*const check_mtu)(void *skb, __u32 device, __u32 *mtu, __s32 difference, __u64 flags) =
	(void *)BPF_FUNC_check_mtu;
static long (*const skb_change_type)(void *skb, __u32 type) = (void *)BPF_FUNC_skb_change_type;
static long (*const fib_lookup)(void *ctx, struct bpf_fib_lookup *params, int size, __u32 flags) =
	(void *)BPF_FUNC_fib_lookup;
static long (*const redirect_peer)(__u32 device, __u64 flags) = (void *)BPF_FUNC_redirect_peer;

/* Written by the proxy. */
MAP(pod_devices, BPF_MAP_TYPE_HASH, __u32, struct pod_device, 1, BPF_F_NO_PREALLOC);
/* IPv4, IPv6. */
MAP(pod_networks, BPF_MAP_TYPE_ARRAY, __u32, struct pod_network, 2, 0);

/* Written by the program. */
MAP(pods, BPF_MAP_TYPE_LRU_HASH, struct address, struct pod, 1, 0);
MAP(pod_counters, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, __u64, POD_COUNTERS, 0);

#define PACKET_TO_THIS_HOST 0
#define FAMILY_IPV4 2
#define FAMILY_IPV6 10
/* A pod that sends is checked again after the first time, and not known any more after the second. */
#define CHECK_AFTER (NANOSECONDS / 4)
#define KNOWN_FOR NANOSECONDS

struct packet {
	struct address source;
	struct address destination;
	__u32 is_six;
	__u32 is_last_hop;
};

INLINE int leave(__u32 counter)
{
	__u64 *value = map_lookup(&pod_counters, &counter);
	if (value)
		*value += 1;
	return TC_ACT_UNSPEC;
}

INLINE int is_same_address(const __u8 *one, const __u8 *other)
{
	int differs = 0;
	for (int at = 0; at < HARDWARE_ADDRESS; at++)
		differs |= one[at] ^ other[at];
	return !differs;
}

INLINE int is_in(const struct pod_network *network, const struct address *address)
{
	__u32 differs = 0;
	for (int word = 0; word < 4; word++)
		differs |= (address->words[word] ^ network->address.words[word]) & network->mask.words[word];
	return !differs;
}

/* 0: nothing that the program looks at. */
INLINE int read(struct __sk_buff *skb, struct ethhdr *frame, struct packet *packet)
{
	void *end = (void *)(long)skb->data_end;
	if (skb->protocol == __builtin_bswap16(ETH_P_IP)) {
		struct iphdr *ip = (void *)(frame + 1);
		if ((void *)(ip + 1) > end || ip->version != 4 || ip->ihl != 5 ||
		    (ip->protocol != TCP && ip->protocol != UDP))
			return 0;
		packet->source.words[2] = packet->destination.words[2] = MAPPED_PREFIX;
		packet->source.words[3] = ip->saddr;
		packet->destination.words[3] = ip->daddr;
		packet->is_last_hop = ip->ttl <= 1;
		return 1;
	}
	struct ipv6hdr *ip = (void *)(frame + 1);
	if (skb->protocol != __builtin_bswap16(ETH_P_IPV6) || (void *)(ip + 1) > end || ip->version != 6 ||
	    (ip->nexthdr != TCP && ip->nexthdr != UDP))
		return 0;
	__builtin_memcpy(&packet->source, &ip->saddr, sizeof(struct address));
	__builtin_memcpy(&packet->destination, &ip->daddr, sizeof(struct address));
	packet->is_six = 1;
	packet->is_last_hop = ip->hop_limit <= 1;
	return 1;
}

/* Whether the node's routes lead to the sender by the way that the packet has come; then it is remembered. */
INLINE int check_source(struct __sk_buff *skb, const struct packet *packet, const struct pod_device *device,
			const struct ethhdr *frame, __u64 now)
{
	struct bpf_fib_lookup route = {.ifindex = device->router};
	if (packet->is_six) {
		route.family = FAMILY_IPV6;
		__builtin_memcpy(route.ipv6_src, &packet->destination, sizeof(struct address));
		__builtin_memcpy(route.ipv6_dst, &packet->source, sizeof(struct address));
	} else {
		route.family = FAMILY_IPV4;
		route.ipv4_src = packet->destination.words[3];
		route.ipv4_dst = packet->source.words[3];
	}
	if (fib_lookup(skb, &route, sizeof(route), 0) != BPF_FIB_LKUP_RET_SUCCESS || route.ifindex != device->router ||
	    !is_same_address(route.dmac, frame->h_source))
		return 0;
	struct pod pod = {.checked_ns = now, .device = skb->ifindex};
	__builtin_memcpy(pod.own_address, route.dmac, HARDWARE_ADDRESS);
	__builtin_memcpy(pod.router_address, route.smac, HARDWARE_ADDRESS);
	return !map_update(&pods, &packet->source, &pod, BPF_ANY);
}

/* As a router does, between the pods. */
INLINE void forward(struct ethhdr *frame, const struct packet *packet, const struct pod *to)
{
	__builtin_memcpy(frame->h_dest, to->own_address, HARDWARE_ADDRESS);
	__builtin_memcpy(frame->h_source, to->router_address, HARDWARE_ADDRESS);
	if (packet->is_six) {
		struct ipv6hdr *ip = (void *)(frame + 1);
		ip->hop_limit -= 1;
		return;
	}
	struct iphdr *ip = (void *)(frame + 1);
	/* The TTL is the first byte of its pair, and one less there is one more in the checksum. */
	__u32 sum = (__u32)ip->check + __builtin_bswap16(0x0100);
	ip->check = (__u16)(sum + (sum >= 0xffff));
	ip->ttl -= 1;
}

SEC("classifier") int keelson_pods(struct __sk_buff *skb)
{
	struct ethhdr *frame = (void *)(long)skb->data;
	struct packet packet = {};
	__u32 device_number = skb->ifindex;
	if ((void *)(frame + 1) > (void *)(long)skb->data_end || skb->vlan_present || !read(skb, frame, &packet))
		return TC_ACT_UNSPEC;
	struct pod_network *network = map_lookup(&pod_networks, &packet.is_six);
	if (!network || !network->is_on || !is_in(network, &packet.source) || !is_in(network, &packet.destination))
		return TC_ACT_UNSPEC;
	struct pod_device *device = map_lookup(&pod_devices, &device_number);
	/* Between ports of a bridge, frames take a way without routes and rules in any case. */
	if (!device || !is_same_address(frame->h_dest, device->router_address))
		return TC_ACT_UNSPEC;
	__u64 now = coarse_now_ns();
	struct pod *from = map_lookup(&pods, &packet.source);
	int is_known = from && from->device == device_number && is_same_address(from->own_address, frame->h_source) &&
		       now - from->checked_ns < CHECK_AFTER;
	if (!is_known && !check_source(skb, &packet, device, frame, now))
		return leave(LEFT_SOURCE);
	struct pod *to = map_lookup(&pods, &packet.destination);
	if (!to || to->device == device_number || now - to->checked_ns >= KNOWN_FOR)
		return leave(LEFT_DESTINATION);
	/* Not 0 either where the device is gone. */
	__u32 mtu = 0;
	if (packet.is_last_hop || check_mtu(skb, to->device, &mtu, 0, BPF_MTU_CHK_SEGS))
		return leave(LEFT_LIMIT);
	/* A frame for the bridge is one for another host at its port. */
	if (skb->pkt_type != PACKET_TO_THIS_HOST && skb_change_type(skb, PACKET_TO_THIS_HOST))
		return leave(LEFT_LIMIT);
	forward(frame, &packet, to);
	leave(HANDED_OVER);
	return (int)redirect_peer(to->device, 0);
}
