/* The program at the devices of pods, one object. build.rs compiles it; docs/ebpf.md describes it.
 *
 * In: what a pod sends. Packets of TCP and UDP to another pod of the node go to that pod's own device, without the routes, rules and
 * devices of the node in between; and replies to outside clients, whose packets direct return has handed over, to the device that
 * leads to the client. Everything else goes on to the kernel as it is: nothing is dropped.
 *
 * Where a pod is, its own packets tell: their source is accepted where the routes of the node lead to this device and hardware
 * address. So a pod that uses the address of another one is left to the kernel. */
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>

#include "shared.h"

/* bpf_fib_lookup asks for a license that is compatible with the GPL. What this object is made of is therefore available under
 * MIT and GPL-2.0 as well. */
const char program_license[] SEC("license") = "Dual MIT/GPL";

static long (*const skb_change_type)(void *skb, __u32 type) = (void *)BPF_FUNC_skb_change_type;

/* Written by the proxy. */
MAP(pod_devices, BPF_MAP_TYPE_HASH, __u32, struct pod_device, 1, BPF_F_NO_PREALLOC);

/* Written by the program. */
/* Replies to clients in fragments: those after the first one have no ports. */
MAP(pod_fragments, BPF_MAP_TYPE_LRU_HASH, struct fragment_key, __u32, 1, 0);
MAP(pod_counters, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, __u64, POD_COUNTERS, 0);

/* A pod that sends is checked again after this time. */
#define CHECK_AFTER (NANOSECONDS / 4)

struct packet {
	struct address source;
	struct address destination;
	__u32 is_six;
	__u32 is_last_hop;
	__u32 protocol;
	/* The size of all headers of IP. */
	__u32 headers;
	enum fragment fragment;
	__u32 id;
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
	if (skb->protocol == ORDER16(ETH_P_IP)) {
		struct iphdr *ip = (void *)(frame + 1);
		if ((void *)(ip + 1) > end || ip->version != 4 || ip->ihl != 5)
			return 0;
		packet->source.words[2] = packet->destination.words[2] = MAPPED_PREFIX;
		packet->source.words[3] = ip->saddr;
		packet->destination.words[3] = ip->daddr;
		packet->is_last_hop = ip->ttl <= 1;
		packet->protocol = ip->protocol;
		packet->headers = sizeof(*ip);
		packet->id = ip->id;
		if (ip->frag_off & ORDER16(FRAGMENT_OFFSET))
			packet->fragment = LATER_FRAGMENT;
		else if (ip->frag_off & ORDER16(MORE_FRAGMENTS))
			packet->fragment = FIRST_FRAGMENT;
		return packet->protocol == TCP || packet->protocol == UDP;
	}
	struct ipv6hdr *ip = (void *)(frame + 1);
	if (skb->protocol != ORDER16(ETH_P_IPV6) || (void *)(ip + 1) > end || ip->version != 6)
		return 0;
	__builtin_memcpy(&packet->source, &ip->saddr, sizeof(struct address));
	__builtin_memcpy(&packet->destination, &ip->daddr, sizeof(struct address));
	packet->is_six = 1;
	packet->is_last_hop = ip->hop_limit <= 1;
	packet->protocol = ip->nexthdr;
	packet->headers = sizeof(*ip);
	if (ip->nexthdr == NEXT_FRAGMENT) {
		struct fragment6 *fragment = (void *)(ip + 1);
		if ((void *)(fragment + 1) > end)
			return 0;
		packet->protocol = fragment->next;
		packet->headers += sizeof(*fragment);
		packet->id = fragment->id;
		packet->fragment = fragment->place & ORDER16(FRAGMENT6_OFFSET) ? LATER_FRAGMENT : FIRST_FRAGMENT;
	}
	return packet->protocol == TCP || packet->protocol == UDP;
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

/* The device that the packet comes from, if its sender is what it says. `goes_on`: a part of a flow of which the network of the node
 * has seen nothing. It would take it for a new one, so what was last known of the sender is enough. */
INLINE struct pod_device *find_sender(struct __sk_buff *skb, const struct ethhdr *frame, const struct packet *packet,
				      int goes_on)
{
	__u32 number = skb->ifindex;
	struct pod_device *device = map_lookup(&pod_devices, &number);
	/* Between ports of a bridge, frames take a way without routes and rules in any case. */
	if (!device || !is_same_address(frame->h_dest, device->router_address))
		return 0;
	__u64 now = coarse_now_ns();
	struct pod *from = map_lookup(&pods, &packet->source);
	int is_known = from && from->device == number && is_same_address(from->own_address, frame->h_source);
	if (is_known && now - from->checked_ns < CHECK_AFTER)
		return device;
	if (check_source(skb, packet, device, frame, now) || (is_known && goes_on))
		return device;
	leave(LEFT_SOURCE);
	return 0;
}

/* As a router does. */
INLINE void take_hop(struct ethhdr *frame, const struct packet *packet)
{
	if (packet->is_six) {
		struct ipv6hdr *ip = (void *)(frame + 1);
		ip->hop_limit -= 1;
		return;
	}
	struct iphdr *ip = (void *)(frame + 1);
	/* The TTL is the first byte of its pair, and one less there is one more in the checksum. */
	__u32 sum = (__u32)ip->check + ORDER16(0x0100);
	ip->check = (__u16)(sum + (sum >= 0xffff));
	ip->ttl -= 1;
}

/* To a pod of this node. */
INLINE int to_pod(struct __sk_buff *skb, struct ethhdr *frame, const struct packet *packet)
{
	struct pod *to = map_lookup(&pods, &packet->destination);
	if (!to || to->device == skb->ifindex || coarse_now_ns() - to->checked_ns >= KNOWN_FOR)
		return leave(LEFT_DESTINATION);
	/* Not 0 either where the device is gone. */
	__u32 mtu = 0;
	if (packet->is_last_hop || check_mtu(skb, to->device, &mtu, 0, BPF_MTU_CHK_SEGS))
		return leave(LEFT_LIMIT);
	/* A frame for the bridge is one for another host at its port. */
	if (skb->pkt_type != PACKET_TO_THIS_HOST && skb_change_type(skb, PACKET_TO_THIS_HOST))
		return leave(LEFT_LIMIT);
	__builtin_memcpy(frame->h_dest, to->own_address, HARDWARE_ADDRESS);
	__builtin_memcpy(frame->h_source, to->router_address, HARDWARE_ADDRESS);
	take_hop(frame, packet);
	leave(HANDED_OVER);
	return (int)redirect_peer(to->device, 0);
}

/* The header of TCP or UDP, as far as this program reads it. */
struct transport {
	__be16 source, destination;
	__u32 size;
};

/* With constants alone: the verifier allows no other arithmetic with pointers without CAP_PERFMON. */
INLINE __u8 *after_ip(struct ethhdr *frame, const struct packet *packet)
{
	__u8 *header = (void *)(frame + 1);
	if (!packet->is_six) {
		header += sizeof(struct iphdr);
		/* The compiler does not put the branches together. */
		asm volatile("" : "+r"(header));
	} else if (packet->fragment == WHOLE) {
		header += sizeof(struct ipv6hdr);
		asm volatile("" : "+r"(header));
	} else {
		header += sizeof(struct ipv6hdr) + sizeof(struct fragment6);
		asm volatile("" : "+r"(header));
	}
	return header;
}

INLINE int read_transport(struct __sk_buff *skb, struct ethhdr *frame, const struct packet *packet,
			  struct transport *transport)
{
	void *end = (void *)(long)skb->data_end;
	__u8 *header = after_ip(frame, packet);
	if ((void *)(header + 8) > end)
		return 0;
	transport->source = *(__be16 *)header;
	transport->destination = *(__be16 *)(header + 2);
	transport->size = 8;
	if (packet->protocol == UDP)
		return 1;
	if ((void *)(header + 20) > end)
		return 0;
	transport->size = (header[12] >> 4) * 4;
	return 1;
}

INLINE struct fragment_key fragment_of(const struct packet *packet)
{
	return (struct fragment_key){
		.source = packet->source,
		.destination = packet->destination,
		.id = packet->id,
		.protocol = packet->protocol,
	};
}

/* What a packet to an outside client is. */
enum reply {
	NO_REPLY,
	/* A flow of direct return that has begun in the network of the node, and stays there. */
	BY_NODE,
	/* One of which this network has seen nothing. */
	BY_DEVICE,
};

INLINE enum reply find_reply(struct __sk_buff *skb, struct ethhdr *frame, const struct packet *packet,
			     struct transport *transport)
{
	if (packet->fragment == LATER_FRAGMENT) {
		struct fragment_key fragment = fragment_of(packet);
		return map_lookup(&pod_fragments, &fragment) ? BY_DEVICE : NO_REPLY;
	}
	if (!read_transport(skb, frame, packet, transport))
		return NO_REPLY;

	struct direct_key back = {
		.client = {.address = packet->destination, .port = transport->destination},
		.other = {.address = packet->source, .port = transport->source},
		.protocol = packet->protocol,
	};
	struct direct_reply *reply = map_lookup(&direct_replies, &back);
	if (!reply)
		return NO_REPLY;
	return reply->is_handed_over ? BY_DEVICE : BY_NODE;
}

/* To the client, by the node's routes. The program at that device gives the reply the address of the Service. */
INLINE int to_client(struct __sk_buff *skb, struct ethhdr *frame, const struct packet *packet,
		     const struct transport *transport, __u32 router)
{
	struct bpf_fib_lookup route = {
		.ifindex = router,
		.l4_protocol = packet->protocol,
		.sport = transport->source,
		.dport = transport->destination,
		.tot_len = skb->len - sizeof(*frame),
	};
	/* Of a segment, where the kernel has joined several. */
	if (skb->gso_size)
		route.tot_len = packet->headers + transport->size + skb->gso_size;
	if (packet->is_six) {
		route.family = FAMILY_IPV6;
		__builtin_memcpy(route.ipv6_src, &packet->source, sizeof(struct address));
		__builtin_memcpy(route.ipv6_dst, &packet->destination, sizeof(struct address));
	} else {
		route.family = FAMILY_IPV4;
		route.ipv4_src = packet->source.words[3];
		route.ipv4_dst = packet->destination.words[3];
	}
	long found = fib_lookup(skb, &route, sizeof(route), 0);
	__u32 device = route.ifindex;
	if (packet->is_last_hop || (found != BPF_FIB_LKUP_RET_SUCCESS && found != BPF_FIB_LKUP_RET_NO_NEIGH) ||
	    !map_lookup(&devices, &device))
		return leave(LEFT_LIMIT);
	struct bpf_redir_neigh next = {.nh_family = route.family};
	__builtin_memcpy(next.ipv6_nh, route.ipv6_dst, sizeof(next.ipv6_nh));
	if (packet->fragment == FIRST_FRAGMENT) {
		struct fragment_key fragment = fragment_of(packet);
		__u32 is_known = 1;
		map_update(&pod_fragments, &fragment, &is_known, BPF_ANY);
	}
	take_hop(frame, packet);
	leave(HANDED_TO_CLIENT);
	return (int)redirect_neigh(device, &next, sizeof(next), 0);
}

SEC("classifier") int keelson_pods(struct __sk_buff *skb)
{
	struct ethhdr *frame = (void *)(long)skb->data;
	struct packet packet = {};
	if ((void *)(frame + 1) > (void *)(long)skb->data_end || skb->vlan_present || !read(skb, frame, &packet))
		return TC_ACT_UNSPEC;
	struct pod_network *network = map_lookup(&pod_networks, &packet.is_six);
	if (!network || !network->is_on || !is_in(network, &packet.source))
		return TC_ACT_UNSPEC;
	if (is_in(network, &packet.destination))
		return find_sender(skb, frame, &packet, 0) ? to_pod(skb, frame, &packet) : TC_ACT_UNSPEC;
	struct transport transport = {};
	enum reply reply = find_reply(skb, frame, &packet, &transport);
	/* By its replies, the pod is known to the next client. */
	struct pod_device *device =
		reply != NO_REPLY ? find_sender(skb, frame, &packet, reply == BY_DEVICE) : 0;
	if (reply != BY_DEVICE || !device)
		return TC_ACT_UNSPEC;
	return to_client(skb, frame, &packet, &transport, device->router);
}
