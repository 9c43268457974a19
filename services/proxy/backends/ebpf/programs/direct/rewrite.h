/* Changes packets: addresses, ports, checksums, notices.
 *
 * Checksums are changed by the difference, so a wrong one stays wrong and its receiver drops the packet. */
#ifndef KEELSON_DIRECT_REWRITE_H
#define KEELSON_DIRECT_REWRITE_H

#include "packet.h"

enum side {
	SOURCE,
	DESTINATION,
};

enum notice {
	NO_NOTICE,
	ADD_NOTICE,
	REMOVE_NOTICE,
};

INLINE __u32 notice_size(const struct packet *packet)
{
	return packet->is_six ? sizeof(struct notice6) : sizeof(struct notice4);
}

INLINE __u16 fold(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return (__u16)sum;
}

/* A checksum after `from` was replaced by `to`. Sizes are multiples of 4. */
INLINE __u16 changed_sum(__u16 sum, void *from, __u32 from_size, void *to, __u32 to_size)
{
	return (__u16)~fold((__u32)csum_diff(from, from_size, to, to_size, (__u16)~sum));
}

/* The checksum of TCP or UDP, of which the addresses are a part, and the port. */
INLINE long change_transport(void *ctx, enum hook hook, const struct packet *packet, __u32 at, enum side side,
			     struct endpoint *from, struct endpoint *to)
{
	__u32 sum_at = at + (packet->protocol == TCP ? 16 : 6);
	__u32 port_at = at + (side == SOURCE ? 0 : 2);
	if (hook == AT_TC) {
		/* A datagram without a checksum stays without. */
		__u64 flags = packet->protocol == UDP ? BPF_F_MARK_MANGLED_0 : 0;
		__s64 difference = csum_diff(&from->address, sizeof(struct address), &to->address,
					     sizeof(struct address), 0);
		return l4_csum_replace(ctx, sum_at, 0, difference, flags | BPF_F_PSEUDO_HDR) ||
		       l4_csum_replace(ctx, sum_at, from->port, to->port, flags | sizeof(to->port)) ||
		       skb_store_bytes(ctx, port_at, &to->port, sizeof(to->port), 0);
	}
	__u16 sum;
	if (xdp_load_bytes(ctx, sum_at, &sum, sizeof(sum)))
		return 1;
	if (sum || packet->protocol == TCP) {
		sum = changed_sum(sum, from, sizeof(*from), to, sizeof(*to));
		if (!sum && packet->protocol == UDP)
			sum = 0xffff;
	}
	return xdp_store_bytes(ctx, sum_at, &sum, sizeof(sum)) ||
	       xdp_store_bytes(ctx, port_at, &to->port, sizeof(to->port));
}

/* Makes room behind the header of IP, or takes it away. */
INLINE long resize(void *ctx, enum hook hook, __s32 difference)
{
	if (hook == AT_TC)
		return skb_adjust_room(ctx, difference, BPF_ADJ_ROOM_NET, 0);
	struct ethhdr ethernet;
	if (xdp_load_bytes(ctx, 0, &ethernet, sizeof(ethernet)) || xdp_adjust_head(ctx, -difference))
		return 1;
	return xdp_store_bytes(ctx, 0, &ethernet, sizeof(ethernet));
}

struct rewrite {
	enum side side;
	enum notice notice;
	/* Counts as a router of the packet. */
	int is_routed;
};

INLINE long rewrite4(void *ctx, enum hook hook, struct packet *packet, const struct rewrite *how, struct endpoint *to)
{
	struct {
		struct iphdr ip;
		struct notice4 notice;
	} fresh;
	__u32 size = sizeof(struct iphdr), fresh_size = size;
	fresh.ip = packet->header.four;
	__builtin_memset(&fresh.notice, 0, sizeof(fresh.notice));
	if (how->side == SOURCE)
		fresh.ip.saddr = to->address.words[3];
	else
		fresh.ip.daddr = to->address.words[3];
	if (how->is_routed)
		fresh.ip.ttl -= 1;
	if (how->notice == ADD_NOTICE) {
		fresh_size = sizeof(fresh);
		fresh.ip.ihl = sizeof(fresh) / 4;
		fresh.ip.tot_len = ORDER16(packet->length + sizeof(fresh.notice));
		fresh.notice = (struct notice4){.type = NOTICE4_TYPE, .length = sizeof(fresh.notice)};
		fresh.notice.port = packet->destination.port;
		fresh.notice.address = packet->destination.address.words[3];
	} else if (how->notice == REMOVE_NOTICE) {
		size = sizeof(fresh);
		fresh.ip.ihl = sizeof(struct iphdr) / 4;
		fresh.ip.tot_len = ORDER16(packet->length - sizeof(fresh.notice));
	}
	__u16 sum = packet->header.four.check;
	packet->header.four.check = fresh.ip.check = 0;
	fresh.ip.check = changed_sum(sum, packet->header.words, size, &fresh, fresh_size);
	packet->header.four.check = sum;
	if (how->notice == ADD_NOTICE)
		return resize(ctx, hook, sizeof(fresh.notice)) || store(ctx, hook, ETH_HLEN, &fresh, sizeof(fresh));
	if (how->notice == REMOVE_NOTICE)
		/* What is taken away is zero by then, and no part of any sum. */
		return store(ctx, hook, ETH_HLEN, &fresh, sizeof(fresh)) ||
		       resize(ctx, hook, -(__s32)sizeof(fresh.notice)) ||
		       (hook == AT_XDP && store(ctx, hook, ETH_HLEN, &fresh.ip, sizeof(fresh.ip)));
	return store(ctx, hook, ETH_HLEN, &fresh.ip, sizeof(fresh.ip));
}

INLINE long rewrite6(void *ctx, enum hook hook, struct packet *packet, const struct rewrite *how, struct endpoint *to)
{
	struct {
		struct ipv6hdr ip;
		struct notice6 notice;
	} fresh;
	fresh.ip = packet->header.six;
	__builtin_memset(&fresh.notice, 0, sizeof(fresh.notice));
	if (how->side == SOURCE)
		__builtin_memcpy(&fresh.ip.saddr, &to->address, sizeof(struct address));
	else
		__builtin_memcpy(&fresh.ip.daddr, &to->address, sizeof(struct address));
	if (how->is_routed)
		fresh.ip.hop_limit -= 1;
	if (how->notice == ADD_NOTICE) {
		fresh.ip.nexthdr = NEXT_OPTIONS;
		fresh.ip.payload_len = ORDER16(packet->length - IPV6_HEADER + sizeof(fresh.notice));
		fresh.notice = (struct notice6){.next = packet->protocol, .length = sizeof(fresh.notice) / 8 - 1};
		fresh.notice.option_type = NOTICE6_TYPE;
		fresh.notice.option_length = sizeof(fresh.notice) - 4;
		fresh.notice.port = packet->destination.port;
		fresh.notice.address = packet->destination.address;
		return resize(ctx, hook, sizeof(fresh.notice)) || store(ctx, hook, ETH_HLEN, &fresh, sizeof(fresh));
	}
	if (how->notice == REMOVE_NOTICE) {
		fresh.ip.nexthdr = packet->protocol;
		fresh.ip.payload_len = ORDER16(packet->length - IPV6_HEADER - sizeof(fresh.notice));
		return store(ctx, hook, ETH_HLEN, &fresh, sizeof(fresh)) ||
		       resize(ctx, hook, -(__s32)sizeof(fresh.notice)) ||
		       (hook == AT_XDP && store(ctx, hook, ETH_HLEN, &fresh.ip, sizeof(fresh.ip)));
	}
	return store(ctx, hook, ETH_HLEN, &fresh.ip, sizeof(fresh.ip));
}

/* Puts another address and port at one side. Not 0: the packet cannot be changed; a notice is the first thing that fails. */
INLINE long rewrite(void *ctx, enum hook hook, struct packet *packet, const struct rewrite *how, struct endpoint *to)
{
	long failed = packet->is_six ? rewrite6(ctx, hook, packet, how, to) : rewrite4(ctx, hook, packet, how, to);
	if (failed)
		return failed;
	__u32 at = packet->transport;
	if (how->notice == ADD_NOTICE)
		at += notice_size(packet);
	if (how->notice == REMOVE_NOTICE)
		at -= notice_size(packet);
	if (packet->fragment == LATER_FRAGMENT || how->notice == REMOVE_NOTICE)
		return 0;
	struct endpoint *from = how->side == SOURCE ? &packet->source : &packet->destination;
	return change_transport(ctx, hook, packet, at, how->side, from, to);
}

#endif
