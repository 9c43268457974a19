/* The maps of Services that the proxy writes, and the look-ups in them that programs share. Sizes are those of src/layout.rs, which
 * sets them when it loads the programs. */
#ifndef KEELSON_SERVICES_H
#define KEELSON_SERVICES_H

#include "kernel.h"
#include "layout.h"

/* Memory is taken as it is needed, except for slots, whose memory the proxy maps to write many at once. */
MAP(frontends, BPF_MAP_TYPE_HASH, struct frontend_key, struct set_key, 1, BPF_F_NO_PREALLOC);
MAP(sets, BPF_MAP_TYPE_HASH, struct set_key, struct set, 1, BPF_F_NO_PREALLOC);
MAP(slots, BPF_MAP_TYPE_ARRAY, __u32, struct slot, 1, BPF_F_MMAPABLE);
MAP(members, BPF_MAP_TYPE_HASH, struct member_key, __u32, 1, BPF_F_NO_PREALLOC);
MAP(node_addresses, BPF_MAP_TYPE_HASH, struct address, __u32, 1, BPF_F_NO_PREALLOC);

INLINE int is_same(const struct endpoint *one, const struct endpoint *other)
{
	return one->port == other->port && one->address.words[0] == other->address.words[0] &&
	       one->address.words[1] == other->address.words[1] && one->address.words[2] == other->address.words[2] &&
	       one->address.words[3] == other->address.words[3];
}

INLINE int is_mapped(const struct address *address)
{
	return !address->words[0] && !address->words[1] && address->words[2] == MAPPED_PREFIX;
}

/* The service port whose node port this is, at whichever address. */
INLINE struct set_key *find_node_port(struct frontend_key *to)
{
	struct frontend_key node_port = *to;
	node_port.scope = SCOPE_NODE_PORT;
	if (!is_mapped(&to->address))
		node_port.address.words[0] = node_port.address.words[1] = node_port.address.words[2] = 0;
	node_port.address.words[3] = 0;
	return map_lookup(&frontends, &node_port);
}

/* Which service port the destination belongs to. */
INLINE struct set_key *find_frontend(struct frontend_key *to)
{
	struct set_key *found = map_lookup(&frontends, to);
	if (found || !map_lookup(&node_addresses, &to->address))
		return found;
	return find_node_port(to);
}

/* Whether the endpoint is one of the service port, with one of these bits. */
INLINE int is_member(__u32 number, const struct endpoint *endpoint, __u32 bits)
{
	struct member_key key = {.number = number, .endpoint = *endpoint};
	__u32 *member = map_lookup(&members, &key);
	return member && (*member & bits);
}

#endif
