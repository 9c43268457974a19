//! The network of a node, in network namespaces of the test, with its clients and servers.
//!
//! Owns: [`World`], the namespaces with pods, another node, clients and a gateway; [`Namespace`], one of them;
//! [`NetClient`], [`Flow`], the clients; [`Forward`], a forwarded address; [`KeelsonProxy`], the proxy under test;
//! [`http_get_from`]. Needs root. Out: who answered a request and which source it saw, or how the request was refused.
//! Addresses are in [`plan`].
//!
//! ```ignore
//! let world = World::new()?;                                       // on a tokio runtime, which serves
//! let _api = Forward::start(world.node(), api_address, cluster.api.address())?;   // 127.0.0.1:PORT, the same inside
//! let proxy = KubeProxy::start(&scratch, &cluster, world.node(), &KubeProxyOptions::new("n1")).await?;
//! let target = "10.96.0.10:80".parse()?;                           // a Service whose endpoint is local(1).at(V4, 8080)
//! world.client().ask_times(target, Transport::Tcp, 100, patience).await?;        // Tally: who answered, whom it saw
//! let mut flow = world.pod().open(target, Transport::Udp)?;        // the same ports each time
//! flow.ask(patience).await?;                                       // Outcome::{Answered, Rejected, Reset, Dropped}
//! world.node().nft(&["list", "ruleset"])?;
//! ```

mod http;
mod icmp;
mod keelson;
mod namespace;
mod node;
pub mod plan;
mod probe;
mod sctp;
mod servers;
mod sockets;
mod world;

pub use http::http_get_from;
pub use keelson::{KeelsonProxy, KeelsonProxyOptions};
pub use namespace::{Forward, Namespace, remove_at_exit};
pub use node::{create_node, node_object};
pub use plan::{Dual, Family};
pub use probe::{Flow, Outcome, Tally, Transport};
pub use sockets::Threads;
pub use world::{NetClient, World};
