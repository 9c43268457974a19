/* What leaves through a device: replies of endpoints of this node get the address of the Service as their source. */
#ifndef KEELSON_DIRECT_EGRESS_H
#define KEELSON_DIRECT_EGRESS_H

#include "choose.h"
#include "rewrite.h"

/* The address that a reply shows. Later fragments show that of the first one, which comes before them. */
INLINE int find_service(struct packet *packet, struct endpoint *service)
{
	struct fragment_key fragment = {
		.source = packet->source.address,
		.destination = packet->destination.address,
		.id = packet->id,
		.protocol = packet->protocol,
	};
	if (packet->fragment == LATER_FRAGMENT) {
		struct address *known = map_lookup(&reply_fragments, &fragment);
		if (!known)
			return 0;
		service->address = *known;
		return 1;
	}
	struct direct_key back = {
		.client = packet->destination, .other = packet->source, .protocol = packet->protocol};
	struct direct_reply *reply = map_lookup(&direct_replies, &back);
	if (!reply)
		return 0;
	reply->used_ns = coarse_now_ns();
	if (packet->protocol == TCP)
		reply->state = tcp_state(packet, reply->state, ENDED_BY_ENDPOINT);
	*service = reply->service;
	if (packet->fragment == FIRST_FRAGMENT)
		map_update(&reply_fragments, &fragment, &service->address, BPF_ANY);
	return 1;
}

INLINE void to_client(void *ctx, struct packet *packet)
{
	struct endpoint service = {};
	if (packet->has_notice || !find_service(packet, &service))
		return;
	struct rewrite how = {.side = SOURCE};
	if (!rewrite(ctx, AT_TC, packet, &how, &service))
		count(REPLY);
}

#endif
