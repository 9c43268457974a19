//! Endpoints are chosen uniformly, at random, for each new connection.

use crate::common::{Case, Setup};
use crate::objects::{Ep, elsewhere};
use anyhow::{Result, ensure};
use keelson_cluster::net::{Family, NetClient, Transport};
use keelson_harness::util::patience;
use serde_json::json;
use std::net::SocketAddr;
use std::time::Duration;

/// Connections of each family and frontend; fewer on a slow machine.
const CONNECTIONS: usize = 2_000;
/// Chi-square with four degrees of freedom exceeds this once in a million: `2e^-x/2 (1 + x/2) / 2 = 1e-6` at this `x`.
const CRITICAL: f64 = 33.377;

async fn is_uniform(
    client: &NetClient,
    to: SocketAddr,
    transport: Transport,
    endpoints: usize,
) -> Result<()> {
    let connections = CONNECTIONS / patience() as usize;
    let tally = client.ask_times(to, transport, connections, Duration::from_secs(10)).await?;
    let counts = tally.by_endpoint();
    let answered: usize = counts.values().sum();
    ensure!(answered == connections && counts.len() == endpoints, "{to}: {tally}");
    let expected = as_float(connections) / as_float(endpoints);
    let chi: f64 = counts.values().map(|count| (as_float(*count) - expected).powi(2) / expected).sum();
    eprintln!("{to} over {}: chi-square {chi:.2} of {counts:?}", transport.name());
    ensure!(chi < CRITICAL, "{to}: chi-square is {chi:.1}: {counts:?}");
    Ok(())
}

fn as_float(number: usize) -> f64 {
    u32::try_from(number).map_or(f64::INFINITY, f64::from)
}

#[test]
fn endpoints_are_chosen_uniformly() -> Result<()> {
    Case::run(150, Setup::Plain, async |case| {
        let ports = [
            crate::objects::port("http", 80, Transport::Tcp),
            crate::objects::port("dns", 80, Transport::Udp),
        ];
        case.make("svc", 1, &json!({"type": "ClusterIP", "ports": ports})).await?;
        let served = [
            crate::objects::port("http", 8080, Transport::Tcp),
            crate::objects::port("dns", 8080, Transport::Udp),
        ];
        let all: [Ep; 5] = [1, 2, 3, 4, 5].map(elsewhere);
        case.slices_of("svc", "a", &served, &all).await?;
        case.synced().await?;
        let pod = case.pod();
        for family in Family::ALL {
            for transport in [Transport::Tcp, Transport::Udp] {
                is_uniform(&pod, case.v(1).at(family), transport, all.len()).await?;
            }
        }
        Ok(())
    })
}
