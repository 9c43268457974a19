/* ICMP errors about packets of a flow: they quote a packet as it was on the way, with the endpoint or with the Service, and are
 * for who has sent it.
 *
 * In: errors that arrive for a Service go to the endpoint, which has sent the quoted reply. Out: errors about packets to an
 * endpoint get the Service, which is what the client has sent to. */
#ifndef KEELSON_DIRECT_ERRORS_H
#define KEELSON_DIRECT_ERRORS_H

#include "egress.h"
#include "ingress.h"

#define ICMP 1
#define ICMP6 58
#define ICMP_HEADER 8

INLINE int is_error(const struct packet *packet, __u8 type)
{
	if (packet->is_six)
		/* Unreachable, too big, time exceeded, parameter problem. */
		return type >= 1 && type <= 4;
	return type == 3 || type == 11 || type == 12;
}

INLINE int read_quoted(void *ctx, enum hook hook, const struct packet *packet, struct quoted *quoted)
{
	__u8 type;
	__u32 at = packet->transport + ICMP_HEADER;
	if (load(ctx, hook, packet->transport, &type, sizeof(type)) || !is_error(packet, type))
		return 0;
	if (packet->is_six) {
		struct ipv6hdr header;
		if (load(ctx, hook, at, &header, sizeof(header)))
			return 0;
		quoted->protocol = header.nexthdr;
		quoted->ports = at + IPV6_HEADER;
		__builtin_memcpy(&quoted->source.address, &header.saddr, sizeof(struct address));
		__builtin_memcpy(&quoted->destination.address, &header.daddr, sizeof(struct address));
		if (header.nexthdr == NEXT_OPTIONS) {
			__u8 next;
			if (load(ctx, hook, quoted->ports, &next, sizeof(next)))
				return 0;
			quoted->protocol = next;
			quoted->ports += sizeof(struct notice6);
		}
	} else {
		struct iphdr *header = &quoted->header;
		if (load(ctx, hook, at, header, sizeof(*header)) || header->ihl < 5 ||
		    header->frag_off & ORDER16(FRAGMENT_OFFSET))
			return 0;
		quoted->protocol = header->protocol;
		quoted->ports = at + header->ihl * 4;
		set_mapped(&quoted->source.address, header->saddr);
		set_mapped(&quoted->destination.address, header->daddr);
	}
	if (quoted->protocol != TCP && quoted->protocol != UDP)
		return 0;
	__be16 ports[2];
	if (load(ctx, hook, quoted->ports, ports, sizeof(ports)))
		return 0;
	quoted->source.port = ports[0];
	quoted->destination.port = ports[1];
	return 1;
}

/* The checksum of the error, after a difference of what it covers: the quoted packet, and for IPv6 the addresses. */
INLINE long change_error_sum(void *ctx, enum hook hook, const struct packet *packet, __u32 difference, int is_address)
{
	__u32 at = packet->transport + 2;
	if (hook == AT_TC)
		return l4_csum_replace(ctx, at, 0, difference, is_address ? BPF_F_PSEUDO_HDR : 0);
	__u16 sum;
	if (xdp_load_bytes(ctx, at, &sum, sizeof(sum)))
		return 1;
	__u64 total = (__u64)difference + (__u16)~sum;
	sum = (__u16)~fold(fold((__u32)total) + (__u32)(total >> 32));
	return xdp_store_bytes(ctx, at, &sum, sizeof(sum));
}

INLINE long store_quoted(void *ctx, enum hook hook, __u32 at, void *from, __u32 size)
{
	return hook == AT_XDP ? xdp_store_bytes(ctx, at, from, size) : skb_store_bytes(ctx, at, from, size, 0);
}

/* Puts another address and port at one side of the quoted packet. The checksum of its transport is not looked at by anyone. */
INLINE long rewrite_quoted(void *ctx, enum hook hook, const struct packet *packet, struct quoted *quoted,
			   enum side side, struct endpoint *to)
{
	struct endpoint *from = side == SOURCE ? &quoted->source : &quoted->destination;
	__u32 at = packet->transport + ICMP_HEADER;
	__u32 difference;
	if (packet->is_six) {
		at += side == SOURCE ? 8 : 24;
		difference = csum_diff(from, sizeof(*from), to, sizeof(*to), 0);
		if (store_quoted(ctx, hook, at, &to->address, sizeof(to->address)))
			return 1;
	} else {
		/* The header with its own checksum adds nothing. */
		__u32 before[2] = {from->port}, after[2] = {to->port};
		difference = csum_diff(before, sizeof(before), after, sizeof(after), 0);
		struct iphdr fresh = quoted->header;
		__u16 sum = fresh.check;
		if (side == SOURCE)
			fresh.saddr = to->address.words[3];
		else
			fresh.daddr = to->address.words[3];
		quoted->header.check = fresh.check = 0;
		fresh.check = changed_sum(sum, &quoted->header, sizeof(fresh), &fresh, sizeof(fresh));
		if (store_quoted(ctx, hook, at, &fresh, sizeof(fresh)))
			return 1;
	}
	__u32 port_at = quoted->ports + (side == SOURCE ? 0 : 2);
	return store_quoted(ctx, hook, port_at, &to->port, sizeof(to->port)) ||
	       change_error_sum(ctx, hook, packet, difference, 0);
}

/* Puts another address at one side of the error itself. */
INLINE long rewrite_error(void *ctx, enum hook hook, struct packet *packet, const struct rewrite *how,
			  struct endpoint *to)
{
	struct endpoint *from = how->side == SOURCE ? &packet->source : &packet->destination;
	if (!packet->is_six)
		return rewrite4(ctx, hook, packet, how, to);
	__u32 difference = csum_diff(&from->address, sizeof(from->address), &to->address, sizeof(to->address), 0);
	return rewrite6(ctx, hook, packet, how, to) || change_error_sum(ctx, hook, packet, difference, 1);
}

INLINE int is_same_address(const struct address *one, const struct address *other)
{
	return one->words[0] == other->words[0] && one->words[1] == other->words[1] &&
	       one->words[2] == other->words[2] && one->words[3] == other->words[3];
}

/* About a reply that was too big for the way to the client, or met the end of it. */
INLINE enum verdict error_from_outside(void *ctx, enum hook hook, struct work *work, __u32 device)
{
	struct quoted *quoted = &work->quoted;
	struct packet *packet = &work->packet;
	struct bpf_fib_lookup *route = &work->route;
	if (packet->fragment || packet->has_options || !read_quoted(ctx, hook, packet, quoted) ||
	    !is_same_address(&packet->destination.address, &quoted->source.address))
		return LEAVE;
	struct direct_key key = {
		.client = quoted->destination, .other = quoted->source, .protocol = quoted->protocol};
	struct direct_flow *known = map_lookup(&direct_flows, &key);
	if (!known)
		return LEAVE;
	struct endpoint to = known->endpoint;
	struct rewrite how = {.side = DESTINATION};
	if (known->is_remote)
		how.is_routed = can_send(hook, find_route(ctx, packet, &to, device, 0, 0, route), route) &&
				packet->ttl > 1;
	if (rewrite_quoted(ctx, hook, packet, quoted, SOURCE, &to) || rewrite_error(ctx, hook, packet, &how, &to))
		return LEAVE;
	count(ICMP_ERROR);
	return how.is_routed ? SEND : LEAVE;
}

/* About a packet of the client that this node or an endpoint could not take. */
INLINE void error_to_client(void *ctx, struct work *work)
{
	struct quoted *quoted = &work->quoted;
	struct packet *packet = &work->packet;
	if (packet->fragment || packet->has_options || !read_quoted(ctx, AT_TC, packet, quoted) ||
	    !is_same_address(&packet->destination.address, &quoted->source.address))
		return;
	struct direct_key back = {
		.client = quoted->source, .other = quoted->destination, .protocol = quoted->protocol};
	struct direct_reply *reply = map_lookup(&direct_replies, &back);
	if (!reply)
		return;
	struct endpoint service = reply->service;
	struct rewrite how = {.side = SOURCE};
	/* One of a router, such as this node, keeps its source. */
	int is_of_endpoint = is_same_address(&packet->source.address, &quoted->destination.address);
	if (rewrite_quoted(ctx, AT_TC, packet, quoted, DESTINATION, &service) ||
	    (is_of_endpoint && rewrite_error(ctx, AT_TC, packet, &how, &service)))
		return;
	count(ICMP_ERROR);
}

INLINE int is_icmp(const struct packet *packet)
{
	return packet->protocol == (packet->is_six ? ICMP6 : ICMP);
}

/* What becomes of a packet that arrives. `frame`, `kind`: as of read_network; `segment`: as of from_client; `pod`: where it is
 * handed over, if it is. */
INLINE enum verdict arrived(void *ctx, enum hook hook, __u32 frame, __be16 kind, __u32 device, __u32 segment,
			    struct work *work, struct pod **pod)
{
	struct packet *packet = &work->packet;
	if (!read_network(ctx, hook, frame, kind, packet))
		return LEAVE;
	if (is_icmp(packet))
		return error_from_outside(ctx, hook, work, device);
	if (!read_ports(ctx, hook, packet))
		return LEAVE;
	if (!packet->has_notice)
		return from_client(ctx, hook, packet, device, segment, work, pod);
	take_notice(ctx, hook, packet);
	return LEAVE;
}

#endif
