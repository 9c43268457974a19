/* Keys and values of the maps. src/layout.rs has the same, and a test compares both with what the kernel says.
 *
 * Addresses have 16 bytes in network order; IPv4 addresses are mapped (::ffff:a.b.c.d). Ports are in network order. All
 * padding is named and zero: keys are compared byte by byte. Change LAYOUT in src/layout.rs with any change of meaning
 * that the sizes do not show. */
#ifndef KEELSON_LAYOUT_H
#define KEELSON_LAYOUT_H

#include <linux/bpf.h>

struct address {
	__u32 words[4];
};

struct endpoint {
	struct address address;
	__be16 port;
	__u16 zero;
};

enum scope {
	SCOPE_ADDRESS = 0,
	/* The address is that of any interface of the node: 0.0.0.0 or ::. */
	SCOPE_NODE_PORT = 1,
};

struct frontend_key {
	struct address address;
	__be16 port;
	__u8 protocol;
	__u8 scope;
};

/* Names a set of endpoints: a service port by its number, and which of its sets. */
struct set_key {
	__u32 number;
	/* 0: all endpoints, 1: those on this node. Frontends of direct return have other bits besides. */
	__u32 kind;
};

struct set {
	/* Place of the first endpoint in `slots`. */
	__u32 first;
	/* Never 0. */
	__u32 count;
	/* Session affinity; 0: none. */
	__u32 affinity_seconds;
	__u32 zero;
};

struct slot {
	struct endpoint endpoint;
	/* Of the service port that has the slot. A program that read a set just before the set moved finds another number. */
	__u32 number;
};

struct member_key {
	__u32 number;
	struct endpoint endpoint;
};

/* Bits of a member: the sets that it is in (1 << kind), whether a UDP flow to it may go on, and, in the maps of direct return,
 * whether it is on this node. */
#define MEMBER_SERVES 4
#define MEMBER_HERE 8

struct affinity_key {
	/* Cookie of the network namespace: a pod, or the node with all pods in its network. */
	__u64 client;
	__u32 number;
	__u32 zero;
};

struct affinity {
	__u64 used_ns;
	struct endpoint endpoint;
	__u32 zero;
};

/* A socket and the address that it sends to (flows) or hears from (replies, peers). */
struct flow_key {
	__u64 socket;
	struct endpoint remote;
	__u32 zero;
};

/* What stands for that address. */
struct flow {
	__u32 number;
	struct endpoint other;
};

enum counter {
	/* Connections and datagrams without a flow that were given an endpoint. */
	CHOSEN_TCP,
	CHOSEN_UDP,
	/* Left to the packet level: the set or its slot changed at this moment. */
	LEFT_CHANGING,
	/* Left to the packet level: the endpoint could not be remembered. */
	LEFT_UNREMEMBERED,
	COUNTERS,
};

#endif
