/* The programs of direct return, one object. build.rs compiles it; docs/ebpf.md describes it.
 *
 * Everything that they do not change or send goes on to the kernel: they drop nothing. */
#include <linux/pkt_cls.h>

#include "direct/errors.h"

/* bpf_fib_lookup asks for a license that is compatible with the GPL. What this object is made of is therefore available under
 * MIT and GPL-2.0 as well. */
const char program_license[] SEC("license") = "Dual MIT/GPL";

SEC("classifier") int keelson_dr_in(struct __sk_buff *skb)
{
	struct work *work = begin_work(WORK_IN);
	if (!work || skb->pkt_type != PACKET_TO_THIS_HOST || skb->vlan_present)
		return TC_ACT_UNSPEC;
	struct pod *pod = 0;
	enum verdict verdict = arrived(skb, AT_TC, skb->len, (__be16)skb->protocol, skb->ingress_ifindex,
				       skb->gso_size, work, &pod);
	if (verdict == HAND_OVER && pod) {
		/* The pod's address, and that of what routes for it. */
		if (skb_store_bytes(skb, 0, pod->own_address, 2 * HARDWARE_ADDRESS, 0))
			return TC_ACT_UNSPEC;
		return (int)redirect_peer(pod->device, 0);
	}
	if (verdict != SEND)
		return TC_ACT_UNSPEC;
	struct bpf_redir_neigh next = {.nh_family = work->route.family};
	__builtin_memcpy(next.ipv6_nh, work->route.ipv6_dst, sizeof(next.ipv6_nh));
	return redirect_neigh(work->route.ifindex, &next, sizeof(next), 0);
}

SEC("classifier") int keelson_dr_out(struct __sk_buff *skb)
{
	struct work *work = begin_work(WORK_OUT);
	if (!work || skb->vlan_present || !read_network(skb, AT_TC, skb->len, (__be16)skb->protocol, &work->packet))
		return TC_ACT_UNSPEC;
	if (is_icmp(&work->packet))
		error_to_client(skb, work);
	else if (read_ports(skb, AT_TC, &work->packet))
		to_client(skb, &work->packet);
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
	struct work *work = begin_work(WORK_IN);
	struct ethhdr ethernet;
	__u32 device = xdp->ingress_ifindex;
	if (xdp_load_bytes(xdp, 0, &ethernet, sizeof(ethernet)))
		return XDP_PASS;
	struct device *own = map_lookup(&devices, &device);
	if (!work || !own || !is_to(own, &ethernet))
		return XDP_PASS;
	struct pod *pod = 0;
	if (arrived(xdp, AT_XDP, xdp_get_buff_len(xdp), ethernet.h_proto, device, 0, work, &pod) == LEAVE)
		return XDP_PASS;
	__builtin_memcpy(ethernet.h_dest, work->route.dmac, ETH_ALEN);
	__builtin_memcpy(ethernet.h_source, work->route.smac, ETH_ALEN);
	ethernet.h_proto = work->packet.is_six ? ORDER16(ETH_P_IPV6) : ORDER16(ETH_P_IP);
	if (xdp_store_bytes(xdp, 0, &ethernet, sizeof(ethernet)))
		return XDP_PASS;
	return work->route.ifindex == device ? XDP_TX : (int)redirect(work->route.ifindex, 0);
}
