/* Back from an endpoint: the source that recvmsg() shows for a datagram, and the peer that getpeername() shows. */
#include "choose.h"

INLINE struct flow *find_service(struct bpf_sock_addr *ctx, struct flow_key *from)
{
	from->socket = socket_cookie(ctx);
	from->remote.port = ctx->user_port;
	__u8 protocol = protocol_of(ctx);
	if (protocol == UDP)
		return map_lookup(&udp_replies, from);
	if (protocol == TCP)
		return map_lookup(&tcp_peers, from);
	return 0;
}

INLINE int reverse4(struct bpf_sock_addr *ctx)
{
	struct flow_key from = {};
	from.remote.address.words[2] = MAPPED_PREFIX;
	from.remote.address.words[3] = ctx->user_ip4;
	struct flow *service = find_service(ctx, &from);
	if (service) {
		ctx->user_ip4 = service->other.address.words[3];
		ctx->user_port = service->other.port;
	}
	return 1;
}

INLINE int reverse6(struct bpf_sock_addr *ctx)
{
	struct flow_key from = {};
	from.remote.address.words[0] = ctx->user_ip6[0];
	from.remote.address.words[1] = ctx->user_ip6[1];
	from.remote.address.words[2] = ctx->user_ip6[2];
	from.remote.address.words[3] = ctx->user_ip6[3];
	struct flow *service = find_service(ctx, &from);
	if (service) {
		ctx->user_ip6[0] = service->other.address.words[0];
		ctx->user_ip6[1] = service->other.address.words[1];
		ctx->user_ip6[2] = service->other.address.words[2];
		ctx->user_ip6[3] = service->other.address.words[3];
		ctx->user_port = service->other.port;
	}
	return 1;
}

SEC("cgroup/recvmsg4") int keelson_recvmsg4(struct bpf_sock_addr *ctx)
{
	return reverse4(ctx);
}

SEC("cgroup/recvmsg6") int keelson_recvmsg6(struct bpf_sock_addr *ctx)
{
	return reverse6(ctx);
}

SEC("cgroup/getpeername4") int keelson_getpeername4(struct bpf_sock_addr *ctx)
{
	return reverse4(ctx);
}

SEC("cgroup/getpeername6") int keelson_getpeername6(struct bpf_sock_addr *ctx)
{
	return reverse6(ctx);
}
