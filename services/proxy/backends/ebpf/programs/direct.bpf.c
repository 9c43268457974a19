/* The programs of direct return, one object. build.rs compiles it; docs/ebpf.md describes it.
 *
 * Everything that they do not change or send goes on to the kernel: they drop nothing. */
#include <linux/pkt_cls.h>

#include "direct/egress.h"
#include "direct/ingress.h"

/* bpf_fib_lookup asks for a license that is compatible with the GPL. What this object is made of is therefore available under
 * MIT and GPL-2.0 as well. */
const char program_license[] SEC("license") = "Dual MIT/GPL";

#define PACKET_TO_THIS_HOST 0

SEC("classifier") int keelson_dr_in(struct __sk_buff *skb)
{
	struct packet packet = {};
	if (skb->pkt_type != PACKET_TO_THIS_HOST || skb->vlan_present ||
	    !read_packet(skb, AT_TC, skb->len, (__be16)skb->protocol, &packet))
		return TC_ACT_UNSPEC;
	if (packet.has_notice) {
		take_notice(skb, AT_TC, &packet);
		return TC_ACT_UNSPEC;
	}
	struct bpf_fib_lookup route;
	if (from_client(skb, AT_TC, &packet, skb->ingress_ifindex, skb->gso_size, &route) == LEAVE)
		return TC_ACT_UNSPEC;
	struct bpf_redir_neigh next = {.nh_family = route.family};
	__builtin_memcpy(next.ipv6_nh, route.ipv6_dst, sizeof(next.ipv6_nh));
	return redirect_neigh(route.ifindex, &next, sizeof(next), 0);
}

SEC("classifier") int keelson_dr_out(struct __sk_buff *skb)
{
	struct packet packet = {};
	if (!skb->vlan_present && read_packet(skb, AT_TC, skb->len, (__be16)skb->protocol, &packet))
		to_client(skb, &packet);
	return TC_ACT_UNSPEC;
}

/* Devices may see frames for others. */
INLINE int is_to(const struct device *own, const struct ethhdr *frame)
{
	int differs = 0;
	for (int at = 0; at < ETH_ALEN; at++)
		differs |= own->hardware_address[at] ^ frame->h_dest[at];
	return !differs;
}

SEC("xdp") int keelson_dr_xdp(struct xdp_md *xdp)
{
	struct packet packet = {};
	struct ethhdr ethernet;
	__u32 device = xdp->ingress_ifindex;
	if (xdp_load_bytes(xdp, 0, &ethernet, sizeof(ethernet)))
		return XDP_PASS;
	struct device *own = map_lookup(&devices, &device);
	if (!own || !is_to(own, &ethernet) ||
	    !read_packet(xdp, AT_XDP, xdp_get_buff_len(xdp), ethernet.h_proto, &packet))
		return XDP_PASS;
	if (packet.has_notice) {
		take_notice(xdp, AT_XDP, &packet);
		return XDP_PASS;
	}
	struct bpf_fib_lookup route;
	if (from_client(xdp, AT_XDP, &packet, device, 0, &route) == LEAVE)
		return XDP_PASS;
	__builtin_memcpy(ethernet.h_dest, route.dmac, ETH_ALEN);
	__builtin_memcpy(ethernet.h_source, route.smac, ETH_ALEN);
	ethernet.h_proto = packet.is_six ? ORDER16(ETH_P_IPV6) : ORDER16(ETH_P_IP);
	if (xdp_store_bytes(xdp, 0, &ethernet, sizeof(ethernet)))
		return XDP_PASS;
	return route.ifindex == device ? XDP_TX : (int)redirect(route.ifindex, 0);
}
