//! Packet priorities: the proxy's marks must not leave the node, and those of others must stay (P12).

use crate::common::{Case, Setup, answer_time};
use crate::expect::Want;
use crate::objects::{elsewhere, on_node};
use crate::subject::Subject;
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::net::plan::remote;
use keelson_cluster::net::{Family, Namespace, Outcome, Transport};
use serde_json::json;

/// Counts packets of translated connections whose priority holds the number of a service port: after the proxy's
/// choice, and where they leave the node.
const WATCH: &str = "table inet watch {
    counter inside { }
    counter left { }
    chain prerouting {
        type filter hook prerouting priority -90;
        ct status dnat meta priority & c000:0 != none counter name inside
    }
    chain output {
        type filter hook output priority -90;
        ct status dnat meta priority & c000:0 != none counter name inside
    }
    chain postrouting {
        type filter hook postrouting priority 300;
        ct status dnat meta priority & c000:0 != none counter name left
    }
}";

/// Sets a priority like the kernel's for a class of traffic without a name, and counts first packets of connections
/// that leave the node with it, and without.
const OTHERS: &str = "table inet others {
    counter kept { }
    counter lost { }
    chain output {
        type filter hook output priority -150;
        tcp dport 8080 meta priority set 8001:1
    }
    chain postrouting {
        type filter hook postrouting priority 300;
        tcp dport 8080 ct state new meta priority 8001:1 counter name kept accept
        tcp dport 8080 ct state new counter name lost
    }
}";

fn packets(node: &Namespace, table: &str, counter: &str) -> Result<u64> {
    let text = node.nft(&["list", "counter", "inet", table, counter])?;
    let (_, packets) = text.split_once("packets ").with_context(|| format!("no count in {text}"))?;
    Ok(packets.split_whitespace().next().unwrap_or_default().parse()?)
}

#[test]
fn p12_no_packet_leaves_with_the_number_of_a_service_port() -> Result<()> {
    Case::run(161, Setup::Plain, async |case| {
        let endpoints = [on_node(&case, 1), elsewhere(1)];
        case.make_with("plain", 1, &json!({}), &endpoints).await?;
        case.make_with("sticky", 2, &json!({"sessionAffinity": "ClientIP"}), &endpoints).await?;
        case.serve("local", 3, &json!({"externalTrafficPolicy": "Local"}), &endpoints).await?;
        let node = case.world().node();
        node.nft(&[WATCH])?;
        let targets = (1..=3).flat_map(|n| [case.v(n), case.w(n), case.np(n)]);
        for target in targets {
            for (client, target, _) in case.all_clients(target, &Want::Drop) {
                for family in Family::ALL {
                    let tally =
                        client.ask_times(target.at(family), Transport::Tcp, 10, answer_time()).await?;
                    let answered: usize = tally.by_endpoint().values().sum();
                    ensure!(answered == 10, "{} of {}: {tally:?}", client.ip(family), target.at(family));
                }
            }
        }
        let (inside, left) = (packets(node, "watch", "inside")?, packets(node, "watch", "left")?);
        ensure!(left == 0, "{left} packets left the node with a number");
        let numbered = case.subject() == Subject::Keelson;
        ensure!((inside > 0) == numbered, "{inside} packets had a number behind the choice");
        Ok(())
    })
}

/// P12: a number is cleared only in packets to Services.
#[test]
fn p12_a_connection_to_no_service_keeps_its_priority() -> Result<()> {
    Case::run_alone(162, Setup::Plain, async |case| {
        case.serve("svc", 1, &json!({}), &[elsewhere(1)]).await?;
        let node = case.world().node();
        node.nft(&[OTHERS])?;
        for family in Family::ALL {
            let to = remote(1).at(family, 8080);
            let answer = case.host().ask(to, Transport::Tcp, answer_time()).await?;
            ensure!(matches!(answer, Outcome::Answered { .. }), "{to}: {answer:?}");
        }
        let (kept, lost) = (packets(node, "others", "kept")?, packets(node, "others", "lost")?);
        node.nft(&["delete table inet others"])?;
        ensure!(kept >= 2 && lost == 0, "{kept} connections kept their priority, {lost} lost it");
        Ok(())
    })
}
