/* From the address of a Service to an endpoint. Every "no" means that the address stays as it is: then the packets that
 * follow are decided by the rules of nftables. */
#ifndef KEELSON_CHOOSE_H
#define KEELSON_CHOOSE_H

#include "maps.h"

/* The call of a socket that wants to reach an address. */
struct socket_call {
	/* What the socket is connected to; without a port if it is not. */
	struct endpoint peer;
	/* connect(), otherwise sendmsg(). */
	int connects;
};

/* The endpoint that this client had before, if it still is in the set. */
INLINE int recall(const struct affinity_key *key, const struct set_key *which, const struct set *set,
		  struct endpoint *chosen)
{
	struct affinity *known = map_lookup(&affinity, key);
	if (!known || now_ns() - known->used_ns >= set->affinity_seconds * NANOSECONDS)
		return 0;
	*chosen = known->endpoint;
	return is_member(which->number, chosen, 1u << (which->kind & 1));
}

INLINE int choose(void *ctx, const struct set_key *which, struct endpoint *chosen)
{
	struct set_key key = *which;
	struct set *set = map_lookup(&sets, &key);
	if (!set || !set->count) {
		count(LEFT_CHANGING);
		return 0;
	}
	struct affinity_key client = {.number = key.number};
	if (set->affinity_seconds) {
		client.client = netns_cookie(ctx);
		if (recall(&client, &key, set, chosen))
			goto remember;
	}
	__u32 place = set->first + random32() % set->count;
	struct slot *slot = map_lookup(&slots, &place);
	if (!slot || slot->number != key.number) {
		count(LEFT_CHANGING);
		return 0;
	}
	*chosen = slot->endpoint;
remember:
	if (set->affinity_seconds) {
		struct affinity used = {.used_ns = now_ns(), .endpoint = *chosen};
		map_update(&affinity, &client, &used, BPF_ANY);
	}
	return 1;
}

/* The endpoint that this UDP socket sends to for this address of the Service, as long as it serves. A socket that is connected
 * to the address knows it itself; for others it is remembered. */
INLINE int recall_flow(const struct flow_key *sent, __u32 number, const struct socket_call *call,
		       struct endpoint *chosen)
{
	if (call->peer.port) {
		struct flow_key key = {.socket = sent->socket, .remote = call->peer};
		struct flow *heard = map_lookup(&udp_replies, &key);
		*chosen = call->peer;
		if (heard && heard->number == number && is_same(&heard->other, &sent->remote) &&
		    is_member(number, chosen, MEMBER_SERVES))
			return 1;
	}
	if (call->connects)
		return 0;
	struct flow *known = map_lookup(&udp_flows, sent);
	if (!known || known->number != number)
		return 0;
	*chosen = known->other;
	return is_member(number, chosen, MEMBER_SERVES);
}

/* Datagrams go to the addresses of Services alone: one to a node port may as well be the answer to a client of the node that
 * has the same port for itself, which connection tracking tells. */
INLINE struct set_key *find_translated(struct frontend_key *to)
{
	if (to->protocol == TCP)
		return find_frontend(to);
	return to->protocol == UDP ? map_lookup(&frontends, to) : 0;
}

/* Replaces the address of a Service by that of an endpoint. Returns 0 if the destination stays. */
INLINE int translate(void *ctx, struct frontend_key *to, const struct socket_call *call, struct endpoint *chosen)
{
	struct set_key *found = find_translated(to);
	if (!found)
		return 0;
	struct set_key which = *found;
	struct flow_key key = {.socket = socket_cookie(ctx)};
	key.remote.address = to->address;
	key.remote.port = to->port;
	struct flow back = {.number = which.number, .other = key.remote};
	if (to->protocol == TCP) {
		if (!choose(ctx, &which, chosen))
			return 0;
		count(CHOSEN_TCP);
		key.remote = *chosen;
		/* Only getpeername needs it: the connection does not depend on it. */
		map_update(&tcp_peers, &key, &back, BPF_ANY);
		return 1;
	}
	int is_known = recall_flow(&key, which.number, call, chosen);
	if (!is_known) {
		if (!choose(ctx, &which, chosen))
			return 0;
		struct flow flow = {.number = which.number, .other = *chosen};
		if (!call->connects && map_update(&udp_flows, &key, &flow, BPF_ANY)) {
			count(LEFT_UNREMEMBERED);
			return 0;
		}
		count(CHOSEN_UDP);
	}
	key.remote = *chosen;
	/* Without it, replies would come from an address that the client does not know. */
	if ((!is_known || !map_lookup(&udp_replies, &key)) && map_update(&udp_replies, &key, &back, BPF_ANY)) {
		count(LEFT_UNREMEMBERED);
		return 0;
	}
	return 1;
}

#endif
