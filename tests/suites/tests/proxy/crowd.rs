//! Health under connections that are never closed: P3.

use crate::common::{Case, Setup};
use crate::expect::kept;
use crate::objects::on_node;
use anyhow::{Context as _, Result, ensure};
use futures_util::future::try_join_all;
use keelson_cluster::net::plan::{CLIENT, NODE};
use keelson_cluster::net::{Family, NetClient, http_get_from};
use keelson_harness::util::patience;
use serde_json::json;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

/// Number of connections open at once; fewer on a slow machine.
const CROWD: usize = 5_000;
/// Number of their source addresses, unless it is one pod.
const SOURCES: u8 = 50;
const HEALTH: u16 = 10256;

/// Opens connections from each of these addresses in turn. Every second one begins a request that it does not end.
async fn crowd(client: &NetClient, sources: &[IpAddr], at: SocketAddr) -> Result<Vec<TcpStream>> {
    let sources: Vec<IpAddr> = sources.iter().copied().cycle().take(CROWD / patience() as usize).collect();
    let mut open = Vec::with_capacity(sources.len());
    for batch in sources.chunks(100) {
        let connect = |source: &IpAddr| {
            let socket = client.namespace().tcp_client(*source);
            async move { socket?.connect(at).await.with_context(|| format!("cannot connect to {at}")) }
        };
        open.extend(try_join_all(batch.iter().map(connect)).await?);
    }
    for stream in open.iter_mut().step_by(2) {
        // The proxy may have closed it for another one.
        let _ = stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: slow\r\n").await;
    }
    Ok(open)
}

/// Load balancer and kubelet get their responses every time.
async fn answers(case: &Case, check: u16) -> Result<()> {
    for round in 0..5 {
        for (port, path) in [(HEALTH, "/healthz"), (HEALTH, "/livez"), (check, "/")] {
            for family in Family::ALL {
                let answer = http_get_from(case.client().namespace(), NODE.at(family, port), path).await;
                let answer = answer.with_context(|| format!("{path} at port {port}, round {round}"))?;
                ensure!(answer.status.as_u16() == 200, "{path} at port {port}: {}", answer.text());
            }
        }
    }
    Ok(())
}

#[test]
fn p3_health_answers_with_five_thousand_open_connections() -> Result<()> {
    Case::run_alone(157, Setup::Plain, async |case| {
        let check = case.node_port(9);
        let spec = json!({"externalTrafficPolicy": "Local", "healthCheckNodePort": check});
        let l1 = on_node(&case, 1);
        case.serve("svc", 1, &spec, std::slice::from_ref(&l1)).await?;
        let client = case.client();
        case.all([(client.clone(), case.w(1), kept([&l1]))]).await?;
        case.eventually("the health check port answers", || answers(&case, check)).await?;

        let [a, b, c, first] = CLIENT.v4.octets();
        let many: Vec<Ipv4Addr> = (1..=SOURCES).map(|n| Ipv4Addr::new(a, b, c, first + n)).collect();
        let lines: String = many.iter().map(|ip| format!("addr add {ip}/32 dev eth0\n")).collect();
        client.namespace().ip(&lines)?;
        let many: Vec<IpAddr> = many.into_iter().map(IpAddr::from).collect();
        let pod = case.pod();
        for (who, sources) in [(&pod, vec![pod.ip(Family::V4)]), (&client, many)] {
            for port in [HEALTH, check] {
                let open = crowd(who, &sources, NODE.at(Family::V4, port)).await?;
                answers(&case, check)
                    .await
                    .with_context(|| format!("{} addresses at {port}", sources.len()))?;
                drop(open);
            }
        }
        Ok(())
    })
}
