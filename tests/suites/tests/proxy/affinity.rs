//! Session affinity: case 47.

use crate::common::{Case, Setup, answer_time, run};
use crate::expect::kept;
use crate::objects::{Ep, PORT, elsewhere, port};
use crate::subject::{differs_by_design, is_ipvs};
use anyhow::{Context as _, Result, bail, ensure};
use keelson_cluster::net::{Dual, Family, NetClient, Outcome, Transport};
use serde_json::json;
use std::net::SocketAddr;
use std::time::Duration;

fn all() -> [Ep; 5] {
    [1, 2, 3, 4, 5].map(elsewhere)
}

/// A Service with two ports and ClientIP affinity with this timeout.
async fn sticky(number: u8, seconds: u32) -> Result<Case> {
    let case = Case::new(number, Setup::Plain).await?;
    let mut ports = [port("http", PORT, Transport::Tcp), port("more", PORT + 1, Transport::Tcp)];
    for (n, port) in (1..).zip(&mut ports) {
        port["nodePort"] = json!(case.node_port(n));
    }
    let spec = json!({
        "ports": ports,
        "sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": seconds}},
    });
    case.make("svc", 1, &spec).await?;
    serve(&case, &all()).await?;
    case.synced().await?;
    Ok(case)
}

async fn serve(case: &Case, endpoints: &[Ep]) -> Result<()> {
    let ports = [port("http", 8080, Transport::Tcp), port("more", 8081, Transport::Tcp)];
    case.slices_of("svc", "a", &ports, endpoints).await
}

async fn answering_endpoint(client: &NetClient, to: SocketAddr) -> Result<SocketAddr> {
    match client.ask(to, Transport::Tcp, answer_time()).await? {
        Outcome::Answered { by, .. } => Ok(by),
        other => bail!("{to}: {other:?}"),
    }
}

/// The endpoint that answers several requests, which must be one.
async fn the_one(client: &NetClient, to: SocketAddr) -> Result<SocketAddr> {
    let first = answering_endpoint(client, to).await?;
    let tally = client.ask_times(to, Transport::Tcp, 8, answer_time()).await?;
    ensure!(tally.by_endpoint().keys().eq([&first]), "{first} at first, and then {tally}");
    Ok(first)
}

#[test]
fn case_47_a_client_stays_with_its_endpoint_over_all_frontends_of_a_port() -> Result<()> {
    run(async {
        let case = sticky(47, 10_800).await?;
        let world = case.world();
        let clients = [
            world.client(),
            world.outside_client(),
            world.pod(),
            world.local(1)?,
            world.local(2)?,
            world.local(3)?,
        ];
        let (mut same, mut asked) = (0, 0);
        for family in Family::ALL {
            for client in &clients {
                let one = the_one(client, case.v(1).at(family)).await?;
                for to in [case.w(1), case.np(1), case.v(1)].map(|target| target.at(family)) {
                    let other = the_one(client, to).await?;
                    // IPVS remembers a client for each frontend.
                    let is_same = other == one || is_ipvs();
                    ensure!(is_same, "{} has {one} by V and {other} by {to}", client.ip(family));
                }
                let second = the_one(client, case.v(1).port(PORT + 1).at(family)).await?;
                ensure!(second.port() == 8081, "the second port is {second}");
                asked += 1;
                same += usize::from(second.ip() == one.ip());
            }
        }
        // All are the same by chance once in 5^12 runs. Scheduler rr chooses in turn, for each port the same.
        ensure!(same < asked || is_ipvs(), "the second port is not independent of the first");

        // Changes of other Services do not affect it.
        let to = case.v(1).at(Family::V4);
        let one = the_one(&clients[0], to).await?;
        case.synced().await?;
        ensure!(the_one(&clients[0], to).await? == one, "a change of another Service moved a client");

        // Its endpoint is removed: another is chosen, and kept. It comes back: no client is moved.
        let rest: Vec<Ep> = all().into_iter().filter(|ep| ep.at.of(Family::V4) != one.ip()).collect();
        ensure!(rest.len() == 4, "{one} is no endpoint");
        serve(&case, &rest).await?;
        case.synced().await?;
        let next = the_one(&clients[0], to).await?;
        ensure!(next != one, "{one} is gone and answers");
        serve(&case, &all()).await?;
        case.synced().await?;
        let after = the_one(&clients[0], to).await?;
        ensure!(after == next, "the client was with {next} and was moved to {after}");
        Ok(())
    })
}

#[test]
fn case_47_a_client_idle_for_the_timeout_may_get_another_endpoint() -> Result<()> {
    if differs_by_design(247) {
        return Ok(());
    }
    run(async {
        let case = sticky(247, 2).await?;
        let client = case.client();
        let to = case.w(1).at(Family::V4);
        let one = the_one(&client, to).await?;
        // Each connection restarts the timeout: twice the timeout passes, and nothing has changed.
        for _ in 0..8 {
            tokio::time::sleep(Duration::from_millis(500)).await;
            let now = answering_endpoint(&client, to).await?;
            ensure!(now == one, "was with {one}, is with {now}");
        }
        // The same for all of these by chance once in 5^15 runs.
        for _ in 0..15 {
            tokio::time::sleep(Duration::from_millis(2_500)).await;
            if answering_endpoint(&client, to).await? != one {
                return Ok(());
            }
        }
        bail!("the client never got another than {one}")
    })
}

#[test]
fn case_47_an_endpoint_outside_of_the_set_in_use_is_passed_over() -> Result<()> {
    Case::run(248, Setup::Plain, async |case| {
        let spec = json!({
            "sessionAffinity": "ClientIP", "externalTrafficPolicy": "Local",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 3600}},
        });
        let endpoints = [crate::objects::on_node(&case, 1), elsewhere(1), elsewhere(2), elsewhere(3)];
        case.serve("svc", 1, &spec, &endpoints).await?;
        let c = case.client();
        for family in Family::ALL {
            let v = the_one(&c, case.v(1).at(family)).await?;
            let local: Dual = endpoints[0].at;
            // Any of them: W has only the local ones.
            let w = the_one(&c, case.w(1).at(family)).await?;
            ensure!(w == local.at(family, 8080), "W went to {w} after V went to {v}");
        }
        case.all([(c, case.w(1), kept(&endpoints[..1]))]).await.context("after V was asked")
    })
}
