//! Existing flows: cases 48 to 50.

use crate::common::{Case, Setup, answer_time};
use crate::expect::{Target, Want, kept};
use crate::objects::{Ep, PORT, elsewhere, on_node, port};
use crate::subject::{is_ipvs, transports};
use anyhow::{Context as _, Result, bail, ensure};
use keelson_cluster::endpoints::Kind;
use keelson_cluster::net::plan::remote;
use keelson_cluster::net::{Dual, Family, Flow, NetClient, Outcome, Transport};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;

/// Time without a response after which a request counts as dropped.
const SILENCE: Duration = Duration::from_millis(700);

/// A UDP port with the case's node port.
fn udp(case: &Case, n: u8) -> Value {
    let mut udp = port("dns", PORT, Transport::Udp);
    udp["nodePort"] = json!(case.node_port(n));
    udp
}

fn served(number: u16) -> [Value; 1] {
    [port("dns", number, Transport::Udp)]
}

async fn serve(case: &Case, endpoints: &[Ep]) -> Result<()> {
    case.slices_of("svc", "a", &served(8080), endpoints).await
}

/// Opens flows until this endpoint answers one.
async fn flow_to(client: &NetClient, to: SocketAddr, transport: Transport, endpoint: Dual) -> Result<Flow> {
    // With two endpoints, a hundred failures are no coincidence.
    for _ in 0..100 {
        let mut flow = client.open(to, transport)?;
        match flow.ask(answer_time()).await? {
            Outcome::Answered { by, .. } if by.ip() == endpoint.of(Family::of(to.ip())) => return Ok(flow),
            Outcome::Answered { .. } => {}
            other => bail!("{to} over {}: {other:?}", transport.name()),
        }
    }
    bail!("{to} never chose {endpoint:?}")
}

async fn answered_by(flow: &mut Flow, want: SocketAddr) -> Result<()> {
    match flow.ask(answer_time()).await? {
        Outcome::Answered { by, .. } if by == want => Ok(()),
        other => bail!("wanted {want}: {other:?}"),
    }
}

async fn moved_to(case: &Case, flow: &mut Flow, want: SocketAddr) -> Result<()> {
    let flow = tokio::sync::Mutex::new(flow);
    case.eventually("the flow goes to another endpoint", || async {
        let mut flow = flow.lock().await;
        match flow.ask(SILENCE).await? {
            Outcome::Answered { by, .. } if by == want => Ok(()),
            other => bail!("wanted {want}: {other:?}"),
        }
    })
    .await
}

#[test]
fn case_48_udp_flows_to_a_removed_endpoint_are_deleted_and_others_kept() -> Result<()> {
    Case::run(48, Setup::Plain, async |case| {
        // By default an association that makes no progress is forgotten after three seconds.
        case.world().node().sysctl(&[("netfilter/nf_conntrack_sctp_timeout_cookie_wait", "120")])?;
        let x = case.x_address(1);
        let mut names = vec![("t", Transport::Tcp), ("s", Transport::Sctp), ("dns", Transport::Udp)];
        names.retain(|(_, transport)| transports().contains(transport));
        let mut ports = Vec::new();
        for (name, transport) in names.iter().copied() {
            let mut port = port(name, PORT, transport);
            port["nodePort"] = json!(case.node_port(1));
            ports.push(port);
        }
        case.make("svc", 1, &json!({"ports": ports, "externalIPs": [x.v4, x.v6]})).await?;
        let served: Vec<_> = names.iter().map(|(name, transport)| port(name, 8080, *transport)).collect();
        let (l1, r1) = (on_node(&case, 1), elsewhere(1));
        case.slices_of("svc", "a", &served, &[l1.clone(), r1.clone()]).await?;
        case.synced().await?;

        let frontends: [Target; 4] = [case.v(1), case.w(1), case.x(1), case.np(1)];
        // IPVS forgets such an association after three seconds in any case.
        let kept: &[Transport] =
            if is_ipvs() { &[Transport::Tcp] } else { &[Transport::Tcp, Transport::Sctp] };
        let c = case.client();
        let (mut gone, mut stay, mut others) = (Vec::new(), Vec::new(), Vec::new());
        for family in Family::ALL {
            for frontend in frontends {
                let to = frontend.at(family);
                gone.push((family, flow_to(&c, to, Transport::Udp, r1.at).await?));
                stay.push((family, flow_to(&c, to, Transport::Udp, l1.at).await?));
                for transport in kept.iter().filter(|transport| transports().contains(transport)) {
                    others.push((family, flow_to(&c, to, *transport, r1.at).await?));
                }
            }
        }
        case.slices_of("svc", "a", &served, std::slice::from_ref(&l1)).await?;
        case.synced().await?;
        for (family, flow) in &mut gone {
            moved_to(&case, flow, l1.at.at(*family, 8080)).await?;
        }
        for (family, flow) in &mut stay {
            answered_by(flow, l1.at.at(*family, 8080)).await?;
        }
        for (family, flow) in &mut others {
            answered_by(flow, r1.at.at(*family, 8080)).await.context("a flow of TCP or SCTP")?;
        }
        Ok(())
    })
}

#[test]
fn case_49_untranslated_udp_flows_are_deleted_with_the_first_endpoint() -> Result<()> {
    Case::run(49, Setup::Plain, async |case| {
        // Without any rules the kernel does not track connections at all.
        case.synced().await?;
        let c = case.client();
        // There is no Service: the node forwards it, and has an untranslated entry.
        let mut flows = Vec::new();
        for family in Family::ALL {
            for target in [case.w(1), case.v(1)] {
                let to = target.at(family);
                let mut flow = c.open(to, Transport::Udp)?;
                if target.at(family) == case.v(1).at(family) {
                    // Addresses of ServiceCIDRs are dropped by now: adds an entry as from before any proxy ran.
                    remember(&case, &c, flow.port(), to)?;
                } else {
                    ensure!(flow.ask(SILENCE).await? == Outcome::Dropped, "the gateway answers over UDP");
                    remembers(&case, family, &flow)?;
                }
                flows.push((family, flow));
            }
        }
        case.make("svc", 1, &json!({"ports": [udp(&case, 1)]})).await?;
        case.synced().await?;
        for (family, flow) in &mut flows {
            // It was never answered, so its packets are those of a new connection, and are rejected like those.
            let outcome = flow.ask(SILENCE).await?;
            ensure!(!matches!(outcome, Outcome::Answered { .. }), "there is no endpoint: {outcome:?}");
            remembers(&case, *family, flow).with_context(|| format!("{outcome:?}"))?;
        }
        let r1 = elsewhere(1);
        serve(&case, std::slice::from_ref(&r1)).await?;
        case.synced().await?;
        for (family, flow) in &mut flows {
            moved_to(&case, flow, r1.at.at(*family, 8080)).await?;
        }
        Ok(())
    })
}

/// Adds an untranslated entry to the node's conntrack table.
fn remember(case: &Case, client: &NetClient, port: u16, to: SocketAddr) -> Result<()> {
    let family = Family::of(to.ip());
    let (source, destination) = (client.ip(family).to_string(), to.ip().to_string());
    let (port, to) = (port.to_string(), to.port().to_string());
    let args =
        ["-I", "-p", "udp", "-s", &source, "-d", &destination, "--sport", &port, "--dport", &to, "-t", "600"];
    case.world().node().conntrack(&args).map(drop)
}

/// Fails unless the node has an entry of a UDP flow.
fn remembers(case: &Case, family: Family, flow: &Flow) -> Result<()> {
    let listed = case.world().node().conntrack(&["-L", "-f", conntrack_address(family), "-p", "udp"])?;
    ensure!(listed.contains(&format!("sport={} ", flow.port())), "{flow:?} is not among\n{listed}");
    Ok(())
}

fn conntrack_address(family: Family) -> &'static str {
    match family {
        Family::V4 => "ipv4",
        Family::V6 => "ipv6",
    }
}

#[test]
fn case_49_flows_of_the_last_endpoint_are_kept_until_another_is_added() -> Result<()> {
    Case::run(149, Setup::Plain, async |case| {
        case.make("svc", 1, &json!({"ports": [udp(&case, 1)]})).await?;
        let (l1, r1) = (on_node(&case, 1), elsewhere(1));
        serve(&case, std::slice::from_ref(&l1)).await?;
        case.synced().await?;
        let c = case.client();
        let v = case.v(1).over(Transport::Udp);
        let mut flows = Vec::new();
        for family in Family::ALL {
            flows.push((family, flow_to(&c, v.at(family), Transport::Udp, l1.at).await?));
        }
        serve(&case, &[]).await?;
        case.synced().await?;
        case.all([(c, v, Want::Reject)]).await?;
        for (family, flow) in &mut flows {
            answered_by(flow, l1.at.at(*family, 8080)).await.context("after the last endpoint went")?;
        }
        serve(&case, std::slice::from_ref(&r1)).await?;
        case.synced().await?;
        for (family, flow) in &mut flows {
            moved_to(&case, flow, r1.at.at(*family, 8080)).await?;
        }
        Ok(())
    })
}

#[test]
fn case_50_udp_flows_to_serving_endpoints_are_kept_unless_the_port_changed() -> Result<()> {
    Case::run(50, Setup::Plain, async |case| {
        case.make("svc", 1, &json!({"ports": [udp(&case, 1)], "externalTrafficPolicy": "Local"})).await?;
        let (l1, r1) = (on_node(&case, 1), elsewhere(1));
        serve(&case, &[l1.clone(), r1.clone()]).await?;
        case.synced().await?;
        let pod = case.pod();
        let mut flows = Vec::new();
        for family in Family::ALL {
            for target in [case.w(1), case.v(1)] {
                flows.push((family, flow_to(&pod, target.at(family), Transport::Udp, r1.at).await?));
            }
        }
        // It terminates: no new flow uses it while others are ready, and it serves the existing ones.
        serve(&case, &[l1.clone(), r1.clone().terminating()]).await?;
        case.synced().await?;
        // A sync after which a clean-up has certainly been done.
        serve(&case, &[l1.clone(), r1.clone().terminating(), on_node(&case, 2)]).await?;
        case.synced().await?;
        let new = [l1.clone(), on_node(&case, 2)];
        case.all([(pod.clone(), case.v(1).over(Transport::Udp), kept(&new))]).await?;
        for (family, flow) in &mut flows {
            answered_by(flow, r1.at.at(*family, 8080)).await.context("to an endpoint that leaves")?;
        }

        // Another slice with another port number: R1 serves there from now on.
        case.make("moved", 2, &json!({"ports": [udp(&case, 2)]})).await?;
        case.slices_of("moved", "a", &served(8080), std::slice::from_ref(&r1)).await?;
        case.synced().await?;
        let mut flows = Vec::new();
        for family in Family::ALL {
            flows.push((family, flow_to(&pod, case.v(2).at(family), Transport::Udp, r1.at).await?));
        }
        for family in Family::ALL {
            let slice = case.slice("moved", "a", family, &served(8081), std::slice::from_ref(&r1));
            case.put(Kind::Slice, &slice).await?;
        }
        case.synced().await?;
        for (family, flow) in &mut flows {
            moved_to(&case, flow, remote(1).at(*family, 8081)).await?;
        }
        Ok(())
    })
}
