/* Keys and values of the maps of pod devices. src/pods/layout.rs has the same, and a test compares both. */
#ifndef KEELSON_PODS_LAYOUT_H
#define KEELSON_PODS_LAYOUT_H

#include "../layout.h"

#define HARDWARE_ADDRESS 6

/* A device of a pod, on the node's side. */
struct pod_device {
	/* What routes its packets: the bridge that it is a port of, or itself. */
	__u32 router;
	__u8 router_address[HARDWARE_ADDRESS];
	__u16 zero;
};

/* The network of the pods, of one family. */
struct pod_network {
	struct address address;
	struct address mask;
	/* 0: all packets of the family are left. */
	__u32 is_on;
};

/* Where a pod is. */
struct pod {
	/* When the routes of the node led to it last. */
	__u64 checked_ns;
	__u32 device;
	__u8 own_address[HARDWARE_ADDRESS];
	__u8 router_address[HARDWARE_ADDRESS];
};

enum pod_counter {
	/* Packets that went from one pod to the other, and replies of direct return to the device of the client. */
	HANDED_OVER,
	HANDED_TO_CLIENT,
	/* Left to the network of the node. The source is not the pod's address, as the node's routes have it. */
	LEFT_SOURCE,
	/* The destination is no pod of this node that has sent something lately. */
	LEFT_DESTINATION,
	/* Too large for the other device, or the TTL ends here, or there is no way. */
	LEFT_LIMIT,
	POD_COUNTERS,
};

#endif
