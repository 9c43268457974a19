//! How long syncs take. Run with `--ignored --nocapture`; `SERVICES` and `ENDPOINTS` change the load.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stderr)]

#[path = "../../../src/testing.rs"]
mod testing;

use std::{
    env, fmt,
    net::IpAddr,
    time::{Duration, Instant},
};

use keelson_client::ServiceName;
use keelson_proxy::{
    addresses::NodePortAddresses,
    backend::{Access, Backend, Check, Driver},
    model::{Endpoint, Family, ServicePort},
    options::{IptablesVariant, Options},
};
use keelson_proxy_iptables::Iptables;
use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike as _,
};
use testing::{in_namespace, options, service_port};

const RUNS: u32 = 5;

fn number(name: &str, default: usize) -> usize {
    env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn ip(net: u32, number: usize) -> IpAddr {
    IpAddr::V4((net << 24 | u32::try_from(number).unwrap()).into())
}

fn ports(service: &ServiceName, number: usize, endpoints: usize) -> Vec<ServicePort> {
    let mut port = service_port(service, "http", ip(96, number + 1), 80);
    port.has_any = true;
    port.cluster =
        (0..endpoints).map(|at| Endpoint { ip: ip(10, number * 16 + at + 1), port: 8080 }).collect();
    // A node has a few of the endpoints.
    if number.is_multiple_of(10) {
        port.on_node = vec![port.cluster[0]];
    }
    vec![port]
}

fn name(number: usize) -> ServiceName {
    ServiceName::new("default", &format!("service-{number}"))
}

fn open(options: &Options, services: usize, endpoints: usize) -> Box<dyn Backend> {
    let mut backend = Iptables.open(options, Access::Program).unwrap();
    backend.set_node(options.node_config(&Default::default(), &[], Family::V4).unwrap());
    for at in 0..services {
        let service = name(at);
        backend.set_service(Family::V4, &service, ports(&service, at, endpoints));
    }
    backend
}

/// Of this process and of the programs that it ran: unlike the time on the clock, it depends little on other load.
fn processor_time() -> Duration {
    let of = |who| {
        let usage = getrusage(who).unwrap();
        let times = [usage.user_time(), usage.system_time()];
        times
            .map(|time| Duration::from_micros(u64::try_from(time.num_microseconds()).unwrap()))
            .iter()
            .sum::<Duration>()
    };
    of(UsageWho::RUSAGE_SELF) + of(UsageWho::RUSAGE_CHILDREN)
}

fn measure(run: impl FnOnce()) -> Measured {
    let (begun, processor) = (Instant::now(), processor_time());
    run();
    Measured { processor: processor_time() - processor, clock: begun.elapsed() }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Measured {
    processor: Duration,
    clock: Duration,
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0?} ({:.0?} on the clock)", self.processor, self.clock)
    }
}

fn sync(backend: &mut dyn Backend) -> Measured {
    measure(|| {
        backend.sync(Family::V4, Instant::now()).unwrap();
    })
}

/// The least of some runs: others use the machine, too.
fn least(mut run: impl FnMut() -> Measured) -> Measured {
    (0..RUNS).map(|_| run()).min().unwrap()
}

#[test]
#[ignore = "measures"]
fn syncs() {
    let (services, endpoints) = (number("SERVICES", 1_000), number("ENDPOINTS", 10));
    for variant in [IptablesVariant::Legacy, IptablesVariant::Nft] {
        in_namespace(|| {
            let mut options = options(&["10.244.0.0/16"]);
            options.node_port_addresses = NodePortAddresses::Cidrs(Vec::new());
            options.iptables.variant = variant;
            let mut backend = open(&options, services, endpoints);
            let cold = sync(backend.as_mut());
            let mut backend = open(&options, services, endpoints);
            let restart = sync(backend.as_mut());
            let mut port = 9_000;
            let endpoint = least(|| {
                port += 1;
                let mut changed = ports(&name(7), 7, endpoints);
                changed[0].cluster[0].port = port;
                backend.set_service(Family::V4, &name(7), changed);
                sync(backend.as_mut())
            });
            let mut present = true;
            let service = least(|| {
                present = !present;
                let new = if present { ports(&name(7), 7, endpoints) } else { Vec::new() };
                backend.set_service(Family::V4, &name(7), new);
                sync(backend.as_mut())
            });
            let mut observer = backend.observer().unwrap();
            let read = measure(|| observer.read(Family::V4).unwrap());
            let check = measure(|| {
                assert!(matches!(backend.check(Family::V4, Instant::now()), Check::Done(Ok(_))));
            });
            eprintln!(
                "{variant:?}, {services} Services of {endpoints} endpoints: cold sync {cold}, restart {restart}, \
                 an endpoint {endpoint}, a Service {service}, read {read}, compare {check}"
            );
        });
    }
}
