/* The end of a socket: what it was connected to need not be remembered. So the maps have room for sockets that live, and a new
 * one is given memory that was used a moment ago. What a socket has sent to without connecting stays until the kernel forgets it. */
#include "maps.h"

/* Constant offsets alone lead into the socket: the compiler does not put the branches together. */
#define APART asm volatile("" ::: "memory")

SEC("cgroup/sock_release") int keelson_sock_release(struct bpf_sock *socket)
{
	struct flow_key key = {};
	key.remote.port = socket->dst_port;
	if (!key.remote.port)
		return 1;
	if (socket->family == FAMILY_IPV6) {
		key.remote.address.words[0] = socket->dst_ip6[0];
		key.remote.address.words[1] = socket->dst_ip6[1];
		key.remote.address.words[2] = socket->dst_ip6[2];
		key.remote.address.words[3] = socket->dst_ip6[3];
		APART;
	} else {
		key.remote.address.words[2] = MAPPED_PREFIX;
		key.remote.address.words[3] = socket->dst_ip4;
	}
	key.socket = socket_cookie(socket);
	if (socket->protocol == TCP) {
		map_delete(&tcp_peers, &key);
		APART;
	} else if (socket->protocol == UDP) {
		map_delete(&udp_replies, &key);
	}
	return 1;
}
