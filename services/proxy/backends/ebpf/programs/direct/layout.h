/* Keys and values of the maps of direct return, besides those of Services in ../layout.h. src/direct/layout.rs has the same,
 * and a test compares both. */
#ifndef KEELSON_DIRECT_LAYOUT_H
#define KEELSON_DIRECT_LAYOUT_H

#include "../layout.h"

/* A client, and the address of a Service that it sends to (flows) or the endpoint that answers (replies). */
struct direct_key {
	struct endpoint client;
	struct endpoint other;
	__u32 protocol;
};

struct direct_flow {
	__u32 number;
	struct endpoint endpoint;
	/* The endpoint is on another node. */
	__u32 is_remote;
	/* Both directions skip the network of this node, since the flow began. */
	__u32 is_handed_over;
};

struct direct_reply {
	__u64 used_ns;
	/* The address of the Service that replies show. */
	struct endpoint service;
	/* As of the flow. */
	__u16 is_handed_over;
	/* For how long the proxy lets the flow be idle: see src/direct/flows.rs. */
	__u16 state;
};

/* Who has ended the connection of TCP. */
#define ENDED_BY_CLIENT 1
#define ENDED_BY_ENDPOINT 2
#define ENDED 3
/* One side has reset it, and neither has sent anything since. */
#define RESET 4
/* TCP: more than the opening was seen. UDP: the client has sent again after a second. */
#define LASTS 8
/* What the endpoint sends does not pass this node. */
#define ONE_SIDED 16

/* Fragments of a reply: those after the first one have no ports. */
struct fragment_key {
	struct address source;
	struct address destination;
	__u32 id;
	__u32 protocol;
};

/* Key of a trie: a number of leading bits, and an address. */
struct network_key {
	__u32 bits;
	struct address address;
};

/* Key of a trie: 32 and a number of leading bits of the address. */
struct range_key {
	__u32 bits;
	/* Of the service port. */
	__u32 number;
	struct address address;
};

/* A bit of the kind in a frontend: clients outside of the source ranges are left. */
#define HAS_RANGES 2

/* What a network has. A packet from any of them is left: its reply may take a way without these programs. */
#define NETWORK_NODES 1
#define NETWORK_PODS 2

struct device {
	__u8 hardware_address[6];
	__u16 zero;
	/* The bit in the mark of packets that nftables masquerades. */
	__u32 masquerade;
};

enum direct_counter {
	/* Flows that were given an endpoint. */
	FLOW_HERE,
	FLOW_REMOTE,
	/* Packets to an endpoint of this node: by the network of the node, or to the device of the pod. To one of another node:
	 * redirected, or routed by the kernel. */
	PACKET_HERE,
	PACKET_HANDED_OVER,
	PACKET_REDIRECTED,
	PACKET_ROUTED,
	/* Packets that told this node which address to answer with. */
	NOTICE_TAKEN,
	/* Replies that show the address of the Service. */
	REPLY,
	/* ICMP errors that were translated, in both directions. */
	ICMP_ERROR,
	/* Left to the packet level. */
	LEFT_INSIDE,
	LEFT_FRAGMENT,
	LEFT_OPTIONS,
	LEFT_SET_CHANGING,
	LEFT_NO_ENDPOINT,
	LEFT_UNROUTED,
	LEFT_FULL,
	LEFT_NOTICE,
	LEFT_RANGES,
	DIRECT_COUNTERS,
};

#endif
