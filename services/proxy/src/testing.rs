//! Helpers for tests with the kernel, in this crate and in those of backends.

#![allow(dead_code)] // No crate that includes this file uses all of it.

use std::{
    io::Write as _,
    net::IpAddr,
    process::{Command, Output, Stdio},
    thread,
    time::Duration,
};

use keelson_client::ServiceName;
use keelson_proxy::{
    addresses::NodePortAddresses,
    conntrack::ConntrackOptions,
    model::{PortName, Protocol, ServicePort},
    options::{DetectLocal, EbpfOptions, IptablesOptions, IpvsOptions, Options, RelayOptions},
};
use nix::sched::{CloneFlags, unshare};

/// The default options, with pods detected by these networks.
pub(crate) fn options(cluster_cidrs: &[&str]) -> Options {
    Options {
        service_proxy_name: String::new(),
        bind_address: Vec::new(),
        detect_local: DetectLocal::ClusterCidr(
            cluster_cidrs.iter().map(|net| net.parse().unwrap()).collect(),
        ),
        masquerade_all: false,
        masquerade_bit: 14,
        allow_external_ips: true,
        conntrack: ConntrackOptions::default(),
        relay: RelayOptions::default(),
        node_port_addresses: NodePortAddresses::Primary,
        flowtable_interfaces: Vec::new(),
        iptables: IptablesOptions::default(),
        ipvs: IpvsOptions::default(),
        ebpf: EbpfOptions::default(),
        min_sync_period: Duration::ZERO,
        sync_period: Duration::from_secs(30),
        max_staleness: None,
    }
}

/// A TCP port of a Service with a cluster IP and without endpoints.
pub(crate) fn service_port(service: &ServiceName, name: &str, cluster_ip: IpAddr, port: u16) -> ServicePort {
    ServicePort {
        name: PortName { service: service.clone(), port: name.into(), protocol: Protocol::Tcp },
        port,
        cluster_ip,
        external_ips: Vec::new(),
        load_balancer_ips: Vec::new(),
        node_port: 0,
        internal_local: false,
        external_local: false,
        affinity_seconds: 0,
        source_ranges: Vec::new(),
        has_any: false,
        cluster: Vec::new(),
        local: Vec::new(),
        on_node: Vec::new(),
        serving: Vec::new(),
    }
}

/// Lines are commands for `ip -batch`, of which one process runs all: in a virtual machine a process takes long.
pub(crate) fn ip_batch(options: &[&str], lines: &str) -> Output {
    let mut ip = Command::new("ip");
    ip.args(options).args(["-batch", "-"]);
    ip.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut ip = ip.spawn().expect("the program ip (package iproute2)");
    ip.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    ip.wait_with_output().unwrap()
}

/// Runs `test` on a thread in a new network namespace with the loopback interface up. Programs and threads that it
/// starts are in the namespace, too. Needs root. The namespace ends with the last of them.
pub(crate) fn in_namespace<T: Send>(test: impl FnOnce() -> T + Send) -> T {
    let inside = || {
        unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace needs root");
        let up = Command::new("ip").args(["link", "set", "lo", "up"]).status();
        assert!(up.expect("the program ip (package iproute2)").success());
        test()
    };
    match thread::scope(|scope| scope.spawn(inside).join()) {
        Ok(value) => value,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}
