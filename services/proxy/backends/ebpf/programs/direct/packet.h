/* Reads the headers of a packet, with the same code at tc and XDP.
 *
 * In: a frame of Ethernet. Out: struct packet, or 0 for what these programs do not look at. Every read is checked: what is
 * short or malformed is 0. */
#ifndef KEELSON_DIRECT_PACKET_H
#define KEELSON_DIRECT_PACKET_H

#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>

#include "maps.h"

enum hook {
	AT_TC,
	AT_XDP,
};

#define IPV4_HEADER 20
#define IPV6_HEADER 40
#define NEXT_OPTIONS 60
/* The notice: an IPv4 option or an IPv6 destination option that tells the endpoint's node which address the client has sent to.
 * Their types are those for experiments (RFC 4727): copied to fragments, and skipped by who does not know it. */
struct notice4 {
	__u8 type;
	__u8 length;
	__be16 port;
	__be32 address;
};

struct notice6 {
	__u8 next;
	/* In units of 8 bytes, without the first. */
	__u8 length;
	__u8 option_type;
	__u8 option_length;
	__be16 port;
	__u16 zero;
	struct address address;
};

#define NOTICE4_TYPE 158
#define NOTICE6_TYPE 0x1e

struct packet {
	struct endpoint source;
	struct endpoint destination;
	/* Of a notice. */
	struct endpoint service;
	/* Of the packet, from the header of IP on. */
	__u32 length;
	/* Of the headers of one segment. */
	__u32 headers;
	__u32 id;
	/* Where the header of the transport begins in the frame. */
	__u16 transport;
	__u8 protocol;
	__u8 is_six;
	__u8 ttl;
	__u8 fragment;
	__u8 has_notice;
	/* Options or extension headers that are not the notice. */
	__u8 has_options;
	/* May begin a flow: a SYN without ACK, or a datagram. */
	__u8 is_first;
	/* Of TCP. */
	__u8 has_fin;
	__u8 has_syn;
	__u8 has_rst;
	/* The header of IPv4 with a notice, or that of IPv6. */
	union {
		__u32 words[10];
		struct iphdr four;
		struct ipv6hdr six;
	} header;
};

/* The packet that an ICMP error quotes. */
struct quoted {
	struct endpoint source;
	struct endpoint destination;
	__u32 protocol;
	/* Where the ports are in the frame. */
	__u32 ports;
	/* IPv4. */
	struct iphdr header;
};

/* What programs know about the packet at hand: too much for their stack. Each side has its own, and a processor has one packet
 * at a time there. */
struct work {
	struct packet packet;
	struct quoted quoted;
	struct direct_flow flow;
	struct bpf_fib_lookup route;
};

enum {
	WORK_IN,
	WORK_OUT,
	WORKS,
};

MAP(works, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, struct work, WORKS, 0);

INLINE struct work *begin_work(__u32 side)
{
	struct work *work = map_lookup(&works, &side);
	if (work)
		__builtin_memset(&work->packet, 0, sizeof(work->packet));
	return work;
}

INLINE long load(void *ctx, enum hook hook, __u32 at, void *to, __u32 size)
{
	return hook == AT_XDP ? xdp_load_bytes(ctx, at, to, size) : skb_load_bytes(ctx, at, to, size);
}

/* At tc, a checksum of the whole packet that the device has computed goes on. */
INLINE long store(void *ctx, enum hook hook, __u32 at, void *from, __u32 size)
{
	return hook == AT_XDP ? xdp_store_bytes(ctx, at, from, size) :
				skb_store_bytes(ctx, at, from, size, BPF_F_RECOMPUTE_CSUM);
}

INLINE void set_mapped(struct address *address, __be32 four)
{
	address->words[0] = address->words[1] = 0;
	address->words[2] = MAPPED_PREFIX;
	address->words[3] = four;
}

/* The state of a connection of TCP after a packet of this side. */
INLINE __u16 tcp_state(const struct packet *packet, __u16 state, __u16 side)
{
	if (packet->has_rst)
		return state | RESET;
	return (state & ~RESET) | (packet->has_syn ? 0 : LASTS) | (packet->has_fin ? side : 0);
}

INLINE int has_ended(__u16 state)
{
	return (state & ENDED) == ENDED || state & RESET;
}

/* Ports, and whether a flow may begin or end. 0: the header does not fit. */
INLINE int read_transport(void *ctx, enum hook hook, struct packet *packet)
{
	__u32 before = packet->transport - ETH_HLEN;
	struct {
		__be16 source, destination;
		__be16 udp_length, udp_checksum;
	} ports;
	if (before + sizeof(ports) > packet->length || load(ctx, hook, packet->transport, &ports, sizeof(ports)))
		return 0;
	packet->source.port = ports.source;
	packet->destination.port = ports.destination;
	if (packet->protocol == UDP) {
		packet->is_first = 1;
		packet->headers = before + sizeof(ports);
		return ORDER16(ports.udp_length) >= sizeof(ports);
	}
	__u8 flags[2];
	if (before + 20 > packet->length || load(ctx, hook, packet->transport + 12, flags, sizeof(flags)))
		return 0;
	/* SYN of the flags FIN, SYN, RST and ACK. */
	packet->is_first = (flags[1] & 0x17) == 0x02;
	packet->has_fin = flags[1] & 0x01;
	packet->has_syn = !!(flags[1] & 0x02);
	packet->has_rst = !!(flags[1] & 0x04);
	packet->headers = before + (flags[0] >> 4) * 4;
	return flags[0] >> 4 >= 5 && (packet->fragment || packet->headers <= packet->length);
}

INLINE int read_ipv4(void *ctx, enum hook hook, __u32 frame, struct packet *packet)
{
	struct iphdr *header = &packet->header.four;
	if (load(ctx, hook, ETH_HLEN, header, IPV4_HEADER) || header->version != 4 || header->ihl < 5)
		return 0;
	__u32 size = header->ihl * 4;
	packet->length = ORDER16(header->tot_len);
	if (packet->length < size || ETH_HLEN + packet->length > frame)
		return 0;
	packet->protocol = header->protocol;
	packet->ttl = header->ttl;
	packet->id = header->id;
	packet->transport = ETH_HLEN + size;
	set_mapped(&packet->source.address, header->saddr);
	set_mapped(&packet->destination.address, header->daddr);
	__u16 place = ORDER16(header->frag_off);
	if (place & FRAGMENT_OFFSET)
		packet->fragment = LATER_FRAGMENT;
	else if (place & MORE_FRAGMENTS)
		packet->fragment = FIRST_FRAGMENT;
	if (size == IPV4_HEADER)
		return 1;
	struct notice4 notice;
	packet->has_options = 1;
	if (size != IPV4_HEADER + sizeof(notice))
		return 1;
	if (load(ctx, hook, ETH_HLEN + IPV4_HEADER, &notice, sizeof(notice)))
		return 0;
	if (notice.type == NOTICE4_TYPE && notice.length == sizeof(notice)) {
		packet->has_options = 0;
		packet->has_notice = 1;
		set_mapped(&packet->service.address, notice.address);
		packet->service.port = notice.port;
		__builtin_memcpy(&packet->header.words[IPV4_HEADER / 4], &notice, sizeof(notice));
	}
	return 1;
}

INLINE int read_ipv6(void *ctx, enum hook hook, __u32 frame, struct packet *packet)
{
	struct ipv6hdr *header = &packet->header.six;
	packet->is_six = 1;
	if (load(ctx, hook, ETH_HLEN, header, IPV6_HEADER) || header->version != 6)
		return 0;
	packet->length = IPV6_HEADER + ORDER16(header->payload_len);
	if (ETH_HLEN + packet->length > frame)
		return 0;
	packet->protocol = header->nexthdr;
	packet->ttl = header->hop_limit;
	packet->transport = ETH_HLEN + IPV6_HEADER;
	__builtin_memcpy(&packet->source.address, &header->saddr, sizeof(struct address));
	__builtin_memcpy(&packet->destination.address, &header->daddr, sizeof(struct address));
	if (header->nexthdr == NEXT_FRAGMENT) {
		struct fragment6 fragment;
		if (load(ctx, hook, packet->transport, &fragment, sizeof(fragment)))
			return 0;
		packet->fragment = fragment.place & ORDER16(FRAGMENT6_OFFSET) ? LATER_FRAGMENT : FIRST_FRAGMENT;
		packet->id = fragment.id;
		packet->protocol = fragment.next;
		packet->transport += sizeof(fragment);
	}
	if (header->nexthdr == NEXT_OPTIONS) {
		struct notice6 notice;
		if (packet->length < IPV6_HEADER + sizeof(notice) ||
		    load(ctx, hook, packet->transport, &notice, sizeof(notice)))
			return 0;
		if (notice.length != sizeof(notice) / 8 - 1 || notice.option_type != NOTICE6_TYPE ||
		    notice.option_length != sizeof(notice) - 4)
			return 0;
		packet->has_notice = 1;
		packet->service.address = notice.address;
		packet->service.port = notice.port;
		packet->protocol = notice.next;
		packet->transport += sizeof(notice);
	}
	return 1;
}

/* The header of IP. `frame`: the length of the frame; `kind`: its type. */
INLINE int read_network(void *ctx, enum hook hook, __u32 frame, __be16 kind, struct packet *packet)
{
	if (kind == ORDER16(ETH_P_IP))
		return read_ipv4(ctx, hook, frame, packet);
	return kind == ORDER16(ETH_P_IPV6) && read_ipv6(ctx, hook, frame, packet);
}

/* That of TCP or UDP behind it. Ports of later fragments are 0. */
INLINE int read_ports(void *ctx, enum hook hook, struct packet *packet)
{
	if (packet->protocol != TCP && packet->protocol != UDP)
		return 0;
	return packet->fragment == LATER_FRAGMENT || read_transport(ctx, hook, packet);
}

#endif
