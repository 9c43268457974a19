/* Towards a Service: connect() of TCP and UDP, and sendmsg() of UDP sockets that are not connected. They always let the
 * call go on (1); what differs is the address that it goes on with. */
#include "choose.h"

INLINE int forward4(struct bpf_sock_addr *ctx, int connects)
{
	struct frontend_key to = {.port = ctx->user_port, .protocol = protocol_of(ctx)};
	to.address.words[2] = MAPPED_PREFIX;
	to.address.words[3] = ctx->user_ip4;
	struct socket_call call = {.connects = connects};
	struct bpf_sock *socket = ctx->sk;
	if (socket) {
		call.peer.address.words[2] = MAPPED_PREFIX;
		call.peer.address.words[3] = socket->dst_ip4;
		call.peer.port = socket->dst_port;
	}
	struct endpoint chosen = {};
	if (translate(ctx, &to, &call, &chosen)) {
		ctx->user_ip4 = chosen.address.words[3];
		ctx->user_port = chosen.port;
	}
	return 1;
}

/* IPv4-mapped destinations of IPv6 sockets come here as well, and have endpoints of IPv4. */
INLINE int forward6(struct bpf_sock_addr *ctx, int connects)
{
	struct frontend_key to = {.port = ctx->user_port, .protocol = protocol_of(ctx)};
	to.address.words[0] = ctx->user_ip6[0];
	to.address.words[1] = ctx->user_ip6[1];
	to.address.words[2] = ctx->user_ip6[2];
	to.address.words[3] = ctx->user_ip6[3];
	struct socket_call call = {.connects = connects};
	struct bpf_sock *socket = ctx->sk;
	if (socket) {
		call.peer.address.words[0] = socket->dst_ip6[0];
		call.peer.address.words[1] = socket->dst_ip6[1];
		call.peer.address.words[2] = socket->dst_ip6[2];
		call.peer.address.words[3] = socket->dst_ip6[3];
		call.peer.port = socket->dst_port;
	}
	struct endpoint chosen = {};
	if (translate(ctx, &to, &call, &chosen)) {
		ctx->user_ip6[0] = chosen.address.words[0];
		ctx->user_ip6[1] = chosen.address.words[1];
		ctx->user_ip6[2] = chosen.address.words[2];
		ctx->user_ip6[3] = chosen.address.words[3];
		ctx->user_port = chosen.port;
	}
	return 1;
}

SEC("cgroup/connect4") int keelson_connect4(struct bpf_sock_addr *ctx)
{
	return forward4(ctx, 1);
}

SEC("cgroup/connect6") int keelson_connect6(struct bpf_sock_addr *ctx)
{
	return forward6(ctx, 1);
}

SEC("cgroup/sendmsg4") int keelson_sendmsg4(struct bpf_sock_addr *ctx)
{
	return forward4(ctx, 0);
}

SEC("cgroup/sendmsg6") int keelson_sendmsg6(struct bpf_sock_addr *ctx)
{
	return forward6(ctx, 0);
}
