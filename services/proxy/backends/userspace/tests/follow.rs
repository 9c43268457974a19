//! The backend behind the client and the sync loop, which follow an agent's Endpoints API over TCP: the parts of the proxy
//! that other systems than Linux have, too.
//!
//! Owns: a server of the API, and a consumer as in the proxy. In: states. Out: connections to endpoints.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    pin::Pin,
    thread,
    time::{Duration, Instant},
};

use futures_util::{Stream, stream};
use keelson_client::{BoxError, Client, Handlers, NodeInfo, Position, ServiceEndpoints, ServiceName};
use keelson_proto::localnetv1::{
    Endpoint, EndpointConditions, EndpointPort, IpSet, NextFilter, NextItem, PortMapping, Protocol,
    ServiceIPs,
    endpoints_server::{Endpoints, EndpointsServer},
};
use keelson_proxy::{
    addresses::{LocalAddresses, NodePortAddresses},
    backend::{Access, Driver as _},
    conntrack::ConntrackOptions,
    model::{Family, service_ports},
    options::{DetectLocal, EbpfOptions, IptablesOptions, IpvsOptions, Options, RelayOptions},
    sync::SyncLoop,
};
use keelson_proxy_userspace::Userspace;
use tokio::{runtime::Runtime, sync::watch};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, transport::Server, transport::server::TcpIncoming};

#[cfg(target_os = "linux")]
#[path = "../../../src/testing.rs"]
mod testing;

/// More than the test waits for something that happens.
const PATIENCE: Duration = Duration::from_secs(60);

const PLACE: &str = "127.80.4.1:8401";

/// Serves the newest state, by its number; state 0 is not served.
struct Agent(watch::Receiver<(u64, Vec<ServiceEndpoints>)>);

#[tonic::async_trait]
impl Endpoints for Agent {
    type NextStream = Pin<Box<dyn Stream<Item = Result<NextItem, Status>> + Send>>;

    async fn next(&self, request: Request<NextFilter>) -> Result<Response<Self::NextStream>, Status> {
        let known = request.get_ref().rev;
        let mut states = self.0.clone();
        let (rev, services) = states.wait_for(|(rev, _)| *rev > known).await.unwrap().clone();
        let next = NextFilter { instance_id: 1, rev, ..NextFilter::default() };
        let node = NodeInfo { name: "node".into(), exists: true, ..NodeInfo::default() };
        let first = NextItem { next: Some(next), node: Some(node), ..NextItem::default() };
        let items =
            services.into_iter().map(|service| NextItem { endpoints: Some(service), ..NextItem::default() });
        let all: Vec<_> = [first].into_iter().chain(items).map(Ok).collect();
        Ok(Response::new(Box::pin(stream::iter(all))))
    }
}

/// Programs each state, as the proxy does.
struct Consumer(SyncLoop);

impl Handlers for Consumer {
    fn node(&mut self, node: NodeInfo) {
        self.0.set_node(node, Instant::now());
    }

    fn delete(&mut self, name: &ServiceName) {
        self.0.set(name, Default::default(), Instant::now());
    }

    fn set(&mut self, name: &ServiceName, service: ServiceEndpoints) {
        self.0.set(name, Family::ALL.map(|family| service_ports(&service, family)), Instant::now());
    }

    async fn sync(&mut self, _: &Position) -> Result<(), BoxError> {
        self.0.begin(Instant::now());
        for synced in self.0.sync(Instant::now()) {
            synced.result?;
        }
        Ok(())
    }
}

fn options() -> Options {
    Options {
        service_proxy_name: String::new(),
        bind_address: Vec::new(),
        detect_local: DetectLocal::ClusterCidr(Vec::new()),
        masquerade_all: false,
        masquerade_bit: 14,
        allow_external_ips: true,
        conntrack: ConntrackOptions::default(),
        relay: RelayOptions { redirect: false, ..RelayOptions::default() },
        node_port_addresses: NodePortAddresses::Primary,
        flowtable_interfaces: Vec::new(),
        iptables: IptablesOptions::default(),
        ipvs: IpvsOptions::default(),
        ebpf: EbpfOptions::default(),
        min_sync_period: Duration::ZERO,
        sync_period: Duration::from_secs(1),
        max_staleness: None,
    }
}

fn service(endpoints: &[SocketAddr]) -> ServiceEndpoints {
    let v4 = |ip: String| Some(IpSet { v4: vec![ip], v6: Vec::new() });
    let place: SocketAddr = PLACE.parse().unwrap();
    let endpoint = |at: &SocketAddr| Endpoint {
        hostname: String::new(),
        conditions: Some(EndpointConditions {
            ready: true,
            selected: true,
            serving: true,
            ..Default::default()
        }),
        i_ps: v4(at.ip().to_string()),
        ports: vec![EndpointPort { index: 0, port: at.port().into(), cluster: true, local: false }],
    };
    ServiceEndpoints {
        namespace: "default".into(),
        name: "web".into(),
        r#type: "ClusterIP".into(),
        i_ps: Some(ServiceIPs { cluster_i_ps: v4(place.ip().to_string()), ..ServiceIPs::default() }),
        ports: vec![PortMapping {
            protocol: Protocol::Tcp.into(),
            port: place.port().into(),
            has_any_v4: !endpoints.is_empty(),
            ..PortMapping::default()
        }],
        endpoints: endpoints.iter().map(endpoint).collect(),
        ..ServiceEndpoints::default()
    }
}

/// An endpoint that sends its name and ends the connection.
fn endpoint(name: &'static str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.write_all(name.as_bytes());
        }
    });
    address
}

/// Who answers at the cluster IP.
fn ask() -> std::io::Result<String> {
    let mut name = String::new();
    TcpStream::connect(PLACE)?.read_to_string(&mut name)?;
    Ok(name)
}

fn wait_for(what: &str, mut happened: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !happened() {
        assert!(begun.elapsed() < PATIENCE, "{what} does not happen");
        thread::sleep(Duration::from_millis(5));
    }
}

fn states_of_an_agent_are_served() {
    let (states, received) = watch::channel((0, Vec::new()));
    let runtime = Runtime::new().unwrap();
    let (address, incoming) = runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        (listener.local_addr().unwrap(), TcpIncoming::from(listener))
    });
    let server = Server::builder().add_service(EndpointsServer::new(Agent(received)));
    runtime.spawn(server.serve_with_incoming(incoming));

    let stop = CancellationToken::new();
    let target = format!("tcp://{address}").parse().unwrap();
    let mut client = Client::new(keelson_client::Options { target, ..Default::default() });
    client.cancel_with(stop.clone());
    let backend = Userspace.open(&options(), Access::Program).unwrap();
    let mut consumer = Consumer(SyncLoop::new(backend, options(), &LocalAddresses::default()));
    let followed = runtime.spawn(async move {
        client.run(&mut consumer).await;
        consumer
    });

    let mut rev = 0;
    let mut serve = |services: Vec<ServiceEndpoints>| {
        rev += 1;
        states.send_replace((rev, services));
    };
    let (first, second) = (endpoint("first"), endpoint("second"));
    serve(vec![service(&[first])]);
    wait_for("the first endpoint", || ask().is_ok_and(|name| name == "first"));
    serve(vec![service(&[second])]);
    wait_for("the second endpoint", || ask().is_ok_and(|name| name == "second"));
    serve(vec![service(&[])]);
    wait_for("a refusal", || ask().is_err());
    serve(vec![service(&[first])]);
    wait_for("the endpoint again", || ask().is_ok_and(|name| name == "first"));
    serve(Vec::new());
    wait_for("a refusal", || ask().is_err());
    serve(vec![service(&[first])]);
    wait_for("the Service again", || ask().is_ok());

    stop.cancel();
    let mut consumer = runtime.block_on(followed).unwrap();
    let drain = consumer.0.stop().unwrap();
    drain();
    wait_for("the end", || ask().is_err());
}

#[test]
fn the_states_of_an_agent_are_served_over_tcp() {
    #[cfg(target_os = "linux")]
    testing::in_namespace(states_of_an_agent_are_served);
    #[cfg(not(target_os = "linux"))]
    states_of_an_agent_are_served();
}
