/* What arrives on a device: packets of clients to a Service, and those that another node has sent on. */
#ifndef KEELSON_DIRECT_INGRESS_H
#define KEELSON_DIRECT_INGRESS_H

#include "choose.h"
#include "rewrite.h"

/* Of the first word of IPv6: traffic class and flow label. */
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define FLOW_INFO 0xffffff0fu
#else
#define FLOW_INFO 0x0fffffffu
#endif

/* What becomes of a packet. */
enum verdict {
	/* The kernel goes on with the packet, as it is by now. */
	LEAVE,
	/* It leaves through `route`. */
	SEND,
	/* It goes to the device of a pod. */
	HAND_OVER,
};

/* Whether a node that sent the packet on may have this address of a Service: it must be one of this very service port. So a
 * notice that another node or client has made leads to nothing that a packet to the Service would not. */
INLINE int is_service_of(const struct packet *packet)
{
	struct frontend_key to = {
		.address = packet->service.address, .port = packet->service.port, .protocol = packet->protocol};
	struct set_key *found = map_lookup(&frontends, &to);
	if (!found && find_network(&to.address) & NETWORK_NODES)
		found = find_node_port(&to);
	if (!found || !is_admitted(found, &packet->source.address))
		return 0;
	__u32 number = found->number;
	return is_member(number, &packet->destination, MEMBER_HERE);
}

/* A packet that another node has sent on: its notice is taken out, and replies show that address. */
INLINE void take_notice(void *ctx, enum hook hook, struct packet *packet)
{
	struct direct_key back = {
		.client = packet->source, .other = packet->destination, .protocol = packet->protocol};
	__u32 is_hidden = 0;
	if (!packet->is_first || !is_service_of(packet) || !may_claim(&back, &packet->service, &is_hidden)) {
		count(LEFT_NOTICE);
		return;
	}
	if (!claim(packet, &back, &packet->service, 0, 0)) {
		count(LEFT_FULL);
		return;
	}
	struct rewrite how = {.side = DESTINATION, .notice = REMOVE_NOTICE};
	rewrite(ctx, hook, packet, &how, &packet->destination);
	count(NOTICE_TAKEN);
}

/* A packet that another node has sent on without a notice: what it ends is noted, and nothing else. `back`: that of its flow. */
INLINE void sent_on(const struct packet *packet, const struct direct_key *back)
{
	if (!packet->has_fin && !packet->has_rst)
		return;
	struct direct_reply *reply = map_lookup(&direct_replies, back);
	if (reply)
		reply->state = tcp_state(packet, reply->state, ENDED_BY_CLIENT);
}

/* How the packet leaves this node. `segment`: as of from_client; `added`: bytes that the packet grows by. */
INLINE long find_route(void *ctx, const struct packet *packet, struct endpoint *to, __u32 device, __u32 segment,
		       __u32 added, struct bpf_fib_lookup *route)
{
	__builtin_memset(route, 0, sizeof(*route));
	route->ifindex = device;
	route->l4_protocol = packet->protocol;
	route->sport = packet->source.port;
	route->dport = to->port;
	/* Of a segment, where the kernel has joined several. */
	route->tot_len = (segment ? packet->headers + segment : packet->length) + added;
	if (packet->is_six) {
		route->family = FAMILY_IPV6;
		route->flowinfo = packet->header.words[0] & FLOW_INFO;
		__builtin_memcpy(route->ipv6_src, &packet->source.address, sizeof(struct address));
		__builtin_memcpy(route->ipv6_dst, &to->address, sizeof(struct address));
	} else {
		route->family = FAMILY_IPV4;
		route->tos = packet->header.four.tos;
		route->ipv4_src = packet->source.address.words[3];
		route->ipv4_dst = to->address.words[3];
	}
	return fib_lookup(ctx, route, sizeof(*route), 0);
}

/* XDP needs the address of the next node, and sends through devices of the setting alone. */
INLINE int can_send(enum hook hook, long found, struct bpf_fib_lookup *route)
{
	if (hook == AT_TC)
		return found == BPF_FIB_LKUP_RET_SUCCESS || found == BPF_FIB_LKUP_RET_NO_NEIGH;
	__u32 device = route->ifindex;
	return found == BPF_FIB_LKUP_RET_SUCCESS && map_lookup(&devices, &device);
}

/* To an endpoint of another node. */
INLINE enum verdict send_on(void *ctx, enum hook hook, struct packet *packet, const struct direct_key *key,
			    const struct direct_flow *known, struct direct_flow *flow, __u32 device, __u32 segment,
			    struct bpf_fib_lookup *route)
{
	struct endpoint *to = &flow->endpoint;
	struct rewrite how = {.side = DESTINATION, .notice = packet->is_first ? ADD_NOTICE : NO_NOTICE};
	long found = find_route(ctx, packet, to, device, segment, packet->is_first ? notice_size(packet) : 0, route);
	/* The endpoint's node knows the flow: a datagram for which the notice is too much goes without. */
	if (found == BPF_FIB_LKUP_RET_FRAG_NEEDED && known && packet->protocol == UDP) {
		how.notice = NO_NOTICE;
		found = find_route(ctx, packet, to, device, segment, 0, route);
	}
	int is_sent = can_send(hook, found, route) && packet->ttl > 1;
	int has_route = found == BPF_FIB_LKUP_RET_SUCCESS || found == BPF_FIB_LKUP_RET_NO_NEIGH;
	if (!known && (!has_route || packet->ttl <= 1)) {
		count(LEFT_UNROUTED);
		return LEAVE;
	}
	if (!remember(packet, key, known, flow))
		return LEAVE;
	how.is_routed = is_sent;
	if (rewrite(ctx, hook, packet, &how, to)) {
		if (!known)
			map_delete(&direct_flows, key);
		count(LEFT_UNROUTED);
		return LEAVE;
	}
	count(is_sent ? PACKET_REDIRECTED : PACKET_ROUTED);
	return is_sent ? SEND : LEAVE;
}

/* Where the pod of an endpoint of this node is, if packets of the client may go to its device. */
INLINE struct pod *find_pod(void *ctx, const struct packet *packet, const struct endpoint *endpoint)
{
	__u32 family = packet->is_six;
	struct pod_network *network = map_lookup(&pod_networks, &family);
	if (!network || !network->is_on || packet->ttl <= 1)
		return 0;
	struct pod *pod = map_lookup(&pods, &endpoint->address);
	__u32 mtu = 0;
	if (!pod || coarse_now_ns() - pod->checked_ns >= KNOWN_FOR ||
	    check_mtu(ctx, pod->device, &mtu, 0, BPF_MTU_CHK_SEGS))
		return 0;
	return pod;
}

/* To an endpoint of this node. What has begun in the network of the node stays there: it has seen no reply otherwise. */
INLINE enum verdict hand_on(void *ctx, enum hook hook, struct packet *packet, const struct direct_key *key,
			    const struct direct_flow *known, struct direct_flow *flow, struct pod **pod)
{
	struct pod *to = 0;
	if (hook == AT_TC && (packet->is_first || flow->is_handed_over))
		to = find_pod(ctx, packet, &flow->endpoint);
	if (packet->is_first)
		flow->is_handed_over = to != 0;
	if (!remember(packet, key, known, flow))
		return LEAVE;
	struct rewrite how = {.side = DESTINATION, .is_routed = to != 0};
	if (rewrite(ctx, hook, packet, &how, &flow->endpoint))
		return LEAVE;
	count(to ? PACKET_HANDED_OVER : PACKET_HERE);
	*pod = to;
	return to ? HAND_OVER : LEAVE;
}

/* A client uses one port for two addresses of Services, and nftables may choose the endpoint that the other flow has. It sees nothing of
 * that flow if that was handed over: so it gives this one an address of the node. */
INLINE void masquerade(struct __sk_buff *skb, __u32 device)
{
	struct device *own = map_lookup(&devices, &device);
	if (own)
		skb->mark |= own->masquerade;
}

/* `segment`: the payload of each segment, if the kernel has joined several. */
INLINE enum verdict from_client(void *ctx, enum hook hook, struct packet *packet, __u32 device, __u32 segment,
				struct work *work, struct pod **pod)
{
	struct direct_flow *flow = &work->flow;
	struct direct_key key = {
		.client = packet->source, .other = packet->destination, .protocol = packet->protocol};
	if (packet->fragment || packet->has_options) {
		struct frontend_key to = {
			.address = key.other.address, .port = key.other.port, .protocol = key.protocol};
		if (find_frontend(&to))
			count(packet->fragment ? LEFT_FRAGMENT : LEFT_OPTIONS);
		return LEAVE;
	}
	struct direct_flow *known = map_lookup(&direct_flows, &key);
	if (packet->is_first) {
		__u32 is_hidden = 0;
		int is_chosen = choose(&key, known, flow, &is_hidden);
		if (!is_chosen) {
			if (known)
				map_delete(&direct_flows, &key);
			/* Those of XDP are never handed over. */
			if (hook == AT_TC && is_hidden)
				masquerade(ctx, device);
			return LEAVE;
		}
		if (known && !is_same(&known->endpoint, &flow->endpoint))
			known = 0;
	} else {
		if (!known) {
			sent_on(packet, &key);
			return LEAVE;
		}
		*flow = *known;
	}
	if (flow->is_remote)
		return send_on(ctx, hook, packet, &key, known, flow, device, segment, &work->route);
	return hand_on(ctx, hook, packet, &key, known, flow, pod);
}

#endif
