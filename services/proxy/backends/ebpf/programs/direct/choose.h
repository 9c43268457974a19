/* From the address of a Service to an endpoint, and what both directions of a flow remember. */
#ifndef KEELSON_DIRECT_CHOOSE_H
#define KEELSON_DIRECT_CHOOSE_H

#include "packet.h"

/* A client that uses one port for two addresses of Services would be one flow for an endpoint of both. The second one does not
 * get the endpoint before the first one has ended, or was idle for as long as this. */
#define CLAIM_NS (60 * NANOSECONDS)
#define ATTEMPTS 4

/* Whether replies of this endpoint to this client may show this address of a Service, because they do or because nothing else
 * claims them. `is_hidden`: the network of the node does not see the flow that does. */
INLINE int may_claim(const struct direct_key *back, const struct endpoint *service, __u32 *is_hidden)
{
	struct direct_reply *known = map_lookup(&direct_replies, back);
	if (!known || has_ended(known->state) || is_same(&known->service, service) ||
	    coarse_now_ns() - known->used_ns > CLAIM_NS)
		return 1;
	*is_hidden |= known->is_handed_over;
	return 0;
}

/* The state of a flow after a packet of the client, which is the first one after `idle` nanoseconds. */
INLINE __u16 next_state(const struct packet *packet, __u16 state, __u64 idle)
{
	if (packet->protocol == UDP)
		return state | (idle >= NANOSECONDS ? LASTS : 0);
	if (packet->is_first)
		/* Sent again or forged, while the connection lasts. */
		return has_ended(state) ? state & ONE_SIDED : state;
	return tcp_state(packet, state, ENDED_BY_CLIENT);
}

/* Replies of this endpoint to this client show this address of a Service. 0: there is no room, or they are of another flow by now. */
INLINE int claim(const struct packet *packet, const struct direct_key *back, const struct endpoint *service,
		 __u16 is_handed_over, __u16 is_one_sided)
{
	__u64 now = coarse_now_ns();
	struct direct_reply *known = map_lookup(&direct_replies, back);
	if (known && is_same(&known->service, service)) {
		known->state = next_state(packet, known->state, now - known->used_ns);
		known->is_handed_over = is_handed_over;
		known->used_ns = now;
		return 1;
	}
	/* A late packet of a flow that had the endpoint before. */
	if (known && !packet->is_first && !has_ended(known->state))
		return 0;
	struct direct_reply reply = {.used_ns = now, .service = *service, .is_handed_over = is_handed_over};
	reply.state = next_state(packet, is_one_sided ? ONE_SIDED : 0, 0);
	return !map_update(&direct_replies, back, &reply, BPF_ANY);
}

INLINE struct direct_key back_of(const struct direct_key *key, const struct endpoint *endpoint)
{
	return (struct direct_key){.client = key->client, .other = *endpoint, .protocol = key->protocol};
}

/* One endpoint of the set at random, if it can be reached this way. */
INLINE int try_slot(const struct set_key *which, const struct direct_key *key, struct direct_flow *flow,
		    __u32 *is_hidden)
{
	struct set_key set_key = *which;
	struct set *set = map_lookup(&sets, &set_key);
	__u32 place = set && set->count ? set->first + random32() % set->count : 0;
	struct slot *slot = map_lookup(&slots, &place);
	if (!set || !set->count || !slot || slot->number != which->number) {
		count(LEFT_SET_CHANGING);
		return -1;
	}
	flow->number = which->number;
	flow->endpoint = slot->endpoint;
	flow->is_remote = !is_member(which->number, &flow->endpoint, MEMBER_HERE);
	flow->is_handed_over = 0;
	/* An endpoint elsewhere, where no program translates its replies. */
	if (flow->is_remote && !find_network(&flow->endpoint.address))
		return 0;
	struct direct_key back = back_of(key, &flow->endpoint);
	return may_claim(&back, &key->other, is_hidden);
}

/* An endpoint for a packet that may begin a flow: the one that the flow has, while it serves, or another one. 0: the packet is
 * left, and the reason is counted. `is_hidden`: as of may_claim. */
INLINE int choose(const struct direct_key *key, const struct direct_flow *known, struct direct_flow *flow,
		  __u32 *is_hidden)
{
	struct frontend_key to = {
		.address = key->other.address, .port = key->other.port, .protocol = key->protocol};
	struct set_key *found = find_frontend(&to);
	if (!found)
		return 0;
	struct set_key which = *found;
	if (find_network(&key->client.address)) {
		count(LEFT_INSIDE);
		return 0;
	}
	if (!is_admitted(&which, &key->client.address)) {
		count(LEFT_RANGES);
		return 0;
	}
	which.kind &= 1;
	__u32 bits = key->protocol == UDP ? MEMBER_SERVES : 1u << which.kind;
	if (known && known->number == which.number && is_member(which.number, &known->endpoint, bits)) {
		struct direct_key back = back_of(key, &known->endpoint);
		if (may_claim(&back, &key->other, is_hidden)) {
			*flow = *known;
			return 1;
		}
	}
	for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
		int chosen = try_slot(&which, key, flow, is_hidden);
		if (chosen)
			return chosen > 0;
	}
	count(LEFT_NO_ENDPOINT);
	return 0;
}

/* Remembers both directions. 0: there is no room; then nothing is remembered. */
INLINE int remember(const struct packet *packet, const struct direct_key *key, const struct direct_flow *known,
		    const struct direct_flow *flow)
{
	struct direct_key back = back_of(key, &flow->endpoint);
	int is_new = !known || !is_same(&known->endpoint, &flow->endpoint) || known->number != flow->number;
	int differs = is_new || known->is_handed_over != flow->is_handed_over;
	if (!claim(packet, &back, &key->other, flow->is_handed_over, flow->is_remote)) {
		count(LEFT_FULL);
		return 0;
	}
	if (differs && map_update(&direct_flows, key, flow, BPF_ANY)) {
		map_delete(&direct_replies, &back);
		count(LEFT_FULL);
		return 0;
	}
	if (is_new)
		count(flow->is_remote ? FLOW_REMOTE : FLOW_HERE);
	return 1;
}

#endif
