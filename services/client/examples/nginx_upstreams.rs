//! Writes a file of nginx `upstream` blocks, one for every port of every Service, with the endpoints that receive
//! traffic from this node.
//!
//! ```sh
//! cargo run -p keelson-client --example nginx_upstreams -- \
//!     --file /etc/nginx/upstreams.conf --exec "nginx -s reload"
//! ```
//!
//! The blocks are valid in `http {}` and in `stream {}`; for the latter the file also holds, commented out, the servers
//! that would listen at the cluster IPs. The file is replaced atomically, and only when it changes.

#![allow(clippy::print_stderr)]

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
};

use clap::Parser;
use keelson_client::{
    BoxError, EndpointsArgs, Handlers, Position, ServiceEndpoints, ServiceName,
    localnetv1::{IpSet, PortMapping, Protocol},
};

/// Write the endpoints of this node as nginx upstreams.
#[derive(Parser)]
struct Args {
    /// File to write.
    #[arg(long)]
    file: PathBuf,
    /// Shell command to run after the file has changed.
    #[arg(long)]
    exec: Option<String>,
    #[command(flatten)]
    endpoints: EndpointsArgs,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), BoxError> {
    let args = Args::parse();
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let mut upstreams =
        Upstreams { blocks: BTreeMap::new(), file: args.file, exec: args.exec, changed: false };
    keelson_client::run(args.endpoints.options(), &mut upstreams).await?;
    Ok(())
}

struct Upstreams {
    /// The text of the file for each Service.
    blocks: BTreeMap<ServiceName, String>,
    file: PathBuf,
    exec: Option<String>,
    /// The file has changed, and the command has not succeeded since.
    changed: bool,
}

impl Handlers for Upstreams {
    fn set(&mut self, name: &ServiceName, service: ServiceEndpoints) {
        self.blocks.insert(name.clone(), render(name, &service));
    }

    fn delete(&mut self, name: &ServiceName) {
        self.blocks.remove(name);
    }

    async fn sync(&mut self, position: &Position) -> Result<(), BoxError> {
        let text: String = self.blocks.values().map(String::as_str).collect();
        if replace(&self.file, &text)? {
            eprintln!("{} is that of revision {}", self.file.display(), position.rev);
            self.changed = true;
        }
        if let (true, Some(line)) = (self.changed, self.exec.clone()) {
            // It may take a while, and the connection has to be served meanwhile.
            let run = move || Command::new("sh").args(["-c", &line]).status();
            let status = tokio::task::spawn_blocking(run).await??;
            if !status.success() {
                // A handler that returns an error is called again.
                return Err(format!("the command that follows a change failed: {status}").into());
            }
        }
        self.changed = false;
        Ok(())
    }
}

/// Replaces the file atomically unless it has this text; returns whether it did.
fn replace(file: &Path, text: &str) -> std::io::Result<bool> {
    if fs::read_to_string(file).is_ok_and(|before| before == text) {
        return Ok(false);
    }
    let mut beside = file.as_os_str().to_owned();
    beside.push(".new");
    let mut new = File::create(&beside)?;
    new.write_all(text.as_bytes())?;
    new.sync_all()?;
    fs::rename(&beside, file)?;
    Ok(true)
}

fn render(name: &ServiceName, service: &ServiceEndpoints) -> String {
    let mut text = String::new();
    let none = Vec::new();
    let cluster_ips = service.i_ps.as_ref().and_then(|ips| ips.cluster_i_ps.as_ref()).map_or(none, addresses);
    for (index, port) in service.ports.iter().enumerate() {
        let protocol = match port.protocol() {
            Protocol::Tcp => "",
            Protocol::Udp => " udp",
            // Not supported by nginx.
            Protocol::Sctp | Protocol::Unknown => continue,
        };
        let upstream = upstream_name(name, port);
        let servers = servers(service, index);
        let _ = writeln!(text, "upstream {upstream} {{");
        for server in &servers {
            let _ = writeln!(text, "    server {server};");
        }
        if servers.is_empty() {
            // nginx requires at least one.
            text.push_str("    server 127.0.0.1:9 down;\n");
        }
        text.push_str("}\n");
        for ip in &cluster_ips {
            let listen = format!("{ip}:{}{protocol}", port.port);
            let _ = writeln!(text, "# server {{ listen {listen}; proxy_pass {upstream}; }}");
        }
    }
    text
}

fn upstream_name(name: &ServiceName, port: &PortMapping) -> String {
    let protocol = if port.protocol() == Protocol::Udp { "_udp" } else { "" };
    let port_name = if port.name.is_empty() { port.port.to_string() } else { port.name.clone() };
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
    format!("{}_{}_{port_name}{protocol}", name.namespace(), name.name()).chars().map(plain).collect()
}

/// The endpoints that receive traffic from this node to this port.
fn servers(service: &ServiceEndpoints, index: usize) -> Vec<String> {
    let mut servers = Vec::new();
    for endpoint in &service.endpoints {
        let port = endpoint.ports.iter().find(|port| port.index as usize == index);
        let chosen = |port: &&_| selected(service, port);
        if let (Some(port), Some(ips)) = (port.filter(chosen), &endpoint.i_ps) {
            servers.extend(addresses(ips).into_iter().map(|ip| format!("{ip}:{}", port.port)));
        }
    }
    servers.sort();
    servers.dedup();
    servers
}

fn selected(service: &ServiceEndpoints, port: &keelson_client::localnetv1::EndpointPort) -> bool {
    if service.internal_traffic_to_local { port.local } else { port.cluster }
}

/// Addresses in nginx's syntax. Invalid addresses are left out, so that nothing else gets into the file.
fn addresses(ips: &IpSet) -> Vec<String> {
    let v4 = ips.v4.iter().filter_map(|ip| ip.parse::<std::net::Ipv4Addr>().ok()).map(|ip| ip.to_string());
    let v6 = ips.v6.iter().filter_map(|ip| ip.parse::<std::net::Ipv6Addr>().ok()).map(|ip| format!("[{ip}]"));
    v4.chain(v6).collect()
}

#[cfg(test)]
mod tests {
    use keelson_client::localnetv1::{Endpoint, EndpointPort, ServiceIPs};

    use super::*;

    fn endpoint(v4: &str, v6: &str, ports: &[(u32, i32, bool, bool)]) -> Endpoint {
        let of = |ip: &str| if ip.is_empty() { Vec::new() } else { vec![ip.to_owned()] };
        let port = |&(index, port, cluster, local): &_| EndpointPort { index, port, cluster, local };
        Endpoint {
            i_ps: Some(IpSet { v4: of(v4), v6: of(v6) }),
            ports: ports.iter().map(port).collect(),
            ..Default::default()
        }
    }

    fn service() -> ServiceEndpoints {
        let port = |name: &str, protocol: Protocol, port: i32| PortMapping {
            name: name.into(),
            protocol: protocol.into(),
            port,
            ..Default::default()
        };
        let cluster_ips = IpSet { v4: vec!["10.96.0.7".into()], v6: vec!["fd00::7".into()] };
        ServiceEndpoints {
            i_ps: Some(ServiceIPs { cluster_i_ps: Some(cluster_ips), ..Default::default() }),
            ports: vec![
                port("http", Protocol::Tcp, 80),
                port("", Protocol::Udp, 53),
                port("x", Protocol::Sctp, 9),
            ],
            endpoints: vec![
                endpoint("10.1.0.2", "", &[(0, 8080, true, false), (1, 5353, false, false)]),
                endpoint("10.1.0.1", "", &[(0, 8081, true, true)]),
                endpoint("", "fd00::1", &[(0, 8080, true, false)]),
                endpoint("1;include /etc/passwd", "", &[(0, 8080, true, false)]),
            ],
            ..Default::default()
        }
    }

    #[test]
    fn a_block_for_every_port_that_nginx_can_serve() {
        let name = ServiceName::new("ns", "web.a");
        let expected = "\
upstream ns_web_a_http {
    server 10.1.0.1:8081;
    server 10.1.0.2:8080;
    server [fd00::1]:8080;
}
# server { listen 10.96.0.7:80; proxy_pass ns_web_a_http; }
# server { listen [fd00::7]:80; proxy_pass ns_web_a_http; }
upstream ns_web_a_53_udp {
    server 127.0.0.1:9 down;
}
# server { listen 10.96.0.7:53 udp; proxy_pass ns_web_a_53_udp; }
# server { listen [fd00::7]:53 udp; proxy_pass ns_web_a_53_udp; }
";
        assert_eq!(render(&name, &service()), expected);
        let local = render(&name, &ServiceEndpoints { internal_traffic_to_local: true, ..service() });
        assert!(local.starts_with("upstream ns_web_a_http {\n    server 10.1.0.1:8081;\n}\n"), "{local}");
    }

    #[tokio::test]
    async fn the_file_is_replaced_only_when_it_changes_and_the_command_runs_until_it_succeeds() {
        let folder = tempfile::tempdir().unwrap();
        let (file, runs) = (folder.path().join("upstreams.conf"), folder.path().join("runs"));
        let exec = format!("echo run >> {}", runs.display());
        let mut upstreams = Upstreams {
            blocks: BTreeMap::new(),
            file: file.clone(),
            exec: Some(exec.clone()),
            changed: false,
        };
        let name = ServiceName::new("ns", "web");
        upstreams.set(&name, service());
        for _ in 0..2 {
            upstreams.sync(&Position::default()).await.unwrap();
        }
        assert!(fs::read_to_string(&file).unwrap().contains("upstream ns_web_http {"));
        assert_eq!(fs::read_to_string(&runs).unwrap(), "run\n");
        upstreams.exec = Some("exit 3".into());
        upstreams.delete(&name);
        for _ in 0..2 {
            let error = upstreams.sync(&Position::default()).await.unwrap_err();
            assert!(error.to_string().contains("exit status: 3"), "{error}");
        }
        upstreams.exec = Some(exec);
        upstreams.sync(&Position::default()).await.unwrap();
        assert_eq!(fs::read_to_string(&runs).unwrap(), "run\nrun\n");
        assert_eq!(fs::read_to_string(&file).unwrap(), "");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
