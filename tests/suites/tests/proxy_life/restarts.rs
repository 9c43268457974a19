//! Proxies that are stopped, killed and restarted, with their own rules and with rules of another version.

use crate::common::{TestEnv, eventually_slow, family_of};
use crate::kernel;
use crate::model::{NODE_NAME, PORT, Service, plain_and_affine, pool};
use crate::traffic::Traffic;
use anyhow::{Context as _, Result, bail, ensure};
use keelson_cluster::endpoints::bulk;
use keelson_cluster::net::{Family, NetClient, Outcome, Transport, World};
use keelson_harness::util::PATIENCE;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;

/// With node port and UDP, and with affinity, of both families.
pub(crate) fn services() -> Vec<Service> {
    plain_and_affine(5, 10_800, |plain| {
        plain.transports.push(Transport::Udp);
        plain.expose();
    })
}

fn clients(world: &World) -> [NetClient; 3] {
    [world.pod(), world.client(), world.host()]
}

/// The endpoint of each client of each Service with affinity, with enough requests to exclude chance.
pub(crate) async fn bound(
    world: &World,
    services: &[Service],
) -> Result<BTreeMap<(usize, SocketAddr), SocketAddr>> {
    let mut all = BTreeMap::new();
    for (index, client) in clients(world).iter().enumerate() {
        for service in services.iter().filter(|service| service.affinity.is_some()) {
            let tally = client.ask_times(service.at(), Transport::Tcp, 6, PATIENCE).await?;
            let by = tally.by_endpoint();
            match by.keys().next() {
                Some(one) if by.len() == 1 && tally.0.len() == 1 => all.insert((index, service.at()), *one),
                _ => bail!("client {index} of {}: {tally}", service.at()),
            };
        }
    }
    Ok(all)
}

#[tokio::test(flavor = "multi_thread")]
async fn case_57_restarts_change_nothing_and_break_no_connection() -> Result<()> {
    let services = services();
    let mut env = TestEnv::started(&services).await?;
    let world = env.world.clone();
    let traffic = Traffic::start(&world, &services)?;
    let bound_to = bound(&world, &services).await?;
    let clients = |map: u8| kernel::addresses(world.node(), Family::V4, &format!("affinity-{map}"));
    let entries: usize = (0..8).map(|map| Ok(clients(map)?.len())).sum::<Result<usize>>()?;
    ensure!(entries >= 3, "the kernel remembers {entries} clients");
    // P8: the state shows them too, and their maximum.
    eventually_slow("the state has the clients", || async {
        let v4 = env.family(Family::V4).await?;
        let maps = v4["affinity_clients"].as_object().into_iter().flatten();
        let counted: u64 = maps.filter_map(|(_, clients)| clients.as_u64()).sum();
        ensure!(counted >= 3 && v4["affinity_clients_max"] == 131_072, "{v4}");
        Ok(())
    })
    .await?;
    let generation = kernel::generation(world.node())?;
    for round in 0..6 {
        match round % 2 {
            0 => ensure!(env.proxy.terminate().await?.success(), "it exits with success after SIGTERM"),
            _ => env.proxy.kill9()?,
        }
        traffic.wait_for_answers().await.with_context(|| format!("without a proxy, round {round}"))?;
        env.proxy.start_again(world.node()).await?;
        let state = env.synced().await?;
        for family in Family::ALL {
            let state = family_of(&state, family)?;
            ensure!(
                state["last_added"] == 0 && state["last_deleted"] == 0 && state["repaired"] == 0,
                "{state}"
            );
        }
        traffic.wait_for_answers().await.with_context(|| format!("after round {round}"))?;
        ensure!(
            kernel::generation(world.node())? == generation,
            "a restart without a change is no transaction"
        );
        ensure!(bound(&world, &services).await? == bound_to, "affinity is kept");
    }
    env.wait_for_exact_services(&services).await?;
    traffic.finish().await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn case_57_a_restart_programs_only_what_changed() -> Result<()> {
    let mut services = services();
    let mut env = TestEnv::started(&services).await?;
    let world = env.world.clone();
    let bound_to = bound(&world, &services).await?;
    let generation = kernel::generation(world.node())?;
    env.proxy.kill9()?;
    // One pod of another node instead of another.
    let other = pool(Family::V4, 8080);
    services[0].endpoints = [&other[..4], &other[6..7]].concat();
    services[0].write(&env.manifests)?;
    env.proxy.start_again(world.node()).await?;
    env.wait_for_services(&services).await?;
    let state = env.synced().await?;
    let (v4, v6) = (family_of(&state, Family::V4)?, family_of(&state, Family::V6)?);
    // TCP and UDP have one element each.
    ensure!(v4["last_added"] == 2 && v4["last_deleted"] == 2, "{v4}");
    ensure!(v6["last_added"] == 0 && v6["last_deleted"] == 0, "{v6}");
    ensure!(kernel::generation(world.node())? == generation + 1, "it is one transaction");
    ensure!(bound(&world, &services).await? == bound_to, "affinity is kept");
    env.wait_for_exact_services(&services).await
}

#[tokio::test(flavor = "multi_thread")]
async fn case_58_restored_endpoints_reuse_their_chain() -> Result<()> {
    let mut services = vec![Service::new(1, Family::V4, &pool(Family::V4, 8080)[..5])];
    let env = TestEnv::started(&services).await?;
    let handle = || -> Result<Value> {
        let text = env.node().nft(&["-j", "list", "chain", "ip", "keelson", "lb-5"])?;
        let listed: Value = serde_json::from_str(&text)?;
        let chain =
            listed["nftables"].as_array().into_iter().flatten().find_map(|object| object.get("chain"));
        Ok(chain.context("no chain lb-5")?["handle"].clone())
    };
    let before = handle()?;
    let endpoints = std::mem::take(&mut services[0].endpoints);
    services[0].write(&env.manifests)?;
    env.wait_for_services(&services).await?;
    let refused = env.world.pod().ask(services[0].at(), Transport::Tcp, PATIENCE).await?;
    ensure!(refused == Outcome::Rejected, "{refused:?}");
    services[0].endpoints = endpoints;
    services[0].write(&env.manifests)?;
    env.wait_for_services(&services).await?;
    ensure!(handle()? == before, "it is another chain");
    let traffic = Traffic::start(&env.world, &services)?;
    traffic.finish().await?;
    env.wait_for_exact_services(&services).await
}

/// Number of Services beside the one that changes.
const MANY: usize = 2_000;

#[tokio::test(flavor = "multi_thread")]
async fn case_56_one_endpoint_of_two_thousand_services_is_two_elements_in_one_transaction() -> Result<()> {
    let mut env = TestEnv::new()?;
    let node = fs::read_to_string(env.manifests.path().join("node.json"))?;
    bulk::manifests(env.manifests.path(), NODE_NAME, MANY, 10)?;
    fs::write(env.manifests.path().join("node.json"), node)?;
    env.agent.start_live().await?;
    env.proxy.start_again(env.world.node()).await?;
    let state = env.synced().await?;
    let first = family_of(&state, Family::V4)?;
    ensure!(first["services"] == MANY && first["endpoints"].as_u64() >= Some(MANY as u64 * 10), "{first}");
    let generation = kernel::generation(env.node())?;

    // A change without meaning, and then one of one endpoint: the file has a hundred Services.
    let file = env.manifests.path().join("bulk-00000.json");
    let list: Value = serde_json::from_str(&fs::read_to_string(&file)?)?;
    let items = list["items"].as_array().context("a list")?;
    let mut touched = items.clone();
    touched[0]["metadata"]["annotations"] = json!({"example.org/touched": "yes"});
    env.manifests.put("bulk-00000.json", &touched)?;
    let slice = touched.iter_mut().find(|item| item["metadata"]["name"] == format!("{}-a", bulk::name(3)));
    slice.context("the slice of a Service without hints")?["endpoints"][4]["addresses"][0] =
        json!("10.250.0.1");
    env.manifests.put("bulk-00000.json", &touched)?;
    let after = eventually_slow("the change is in the kernel", || async {
        let state = env.family(Family::V4).await?;
        ensure!(state["syncs"].as_u64() > first["syncs"].as_u64(), "{state}");
        ensure!(env.node().nft(&["list", "map", "ip", "keelson", "slots"])?.contains("10.250.0.1 . 8080"));
        Ok(state)
    })
    .await?;
    ensure!(after["last_added"] == 1 && after["last_deleted"] == 1, "{after}");
    // The proxy checks once a second: it finds no foreign changes.
    let looked = env.dry_run().await?;
    ensure!(looked == ["no changes"], "{looked:?}");
    ensure!(kernel::generation(env.node())? == generation + 1, "it is one transaction");
    let v6 = env.family(Family::V6).await?;
    ensure!(v6["repaired"] == 0 && after["repaired"] == 0 && v6["last_added"] == 0, "{v6}");
    Ok(())
}

/// Text without the blocks with these prefixes, and without lines that contain one of these parts.
fn without(text: &str, blocks: &[&str], parts: &[&str]) -> String {
    let (mut left, mut inside) = (String::new(), false);
    for line in text.lines() {
        inside |= blocks.iter().any(|block| line.trim_start().starts_with(block));
        if !inside && !parts.iter().any(|part| line.contains(part)) {
            left += line;
            left.push('\n');
        }
        inside &= line.trim() != "}";
    }
    left
}

/// Loads text into the node's kernel in one transaction.
fn load(env: &TestEnv, text: &str) -> Result<()> {
    let file = env.scratch.path().join("older.nft");
    fs::write(&file, text)?;
    env.node().nft(&["-f", &file.display().to_string()]).map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_of_another_version_are_replaced_without_breaking_connections() -> Result<()> {
    // nft 1.0.6 cannot load IPv6 affinity.
    let services: Vec<Service> = services()
        .into_iter()
        .filter(|service| service.affinity.is_none() || service.family == Family::V4)
        .collect();
    let mut env = TestEnv::started(&services).await?;
    let world = env.world.clone();
    let traffic = Traffic::start(&world, &services)?;
    traffic.wait_for_answers().await?;
    let own = env.print().await?;
    let other_set = |from: &str, to: &str| {
        let text = own.replace(from, to);
        if text == own { bail!("the rules have no {from:?}") } else { Ok(text) }
    };
    let older = [
        ("a rule more in a counted chain", "insert rule ip keelson lb-5 counter".to_owned()),
        ("chains without a protocol", without(&own, &[], &["meta l4proto sctp"])),
        ("unknown chains and sets", {
            "add chain ip keelson service-1\nadd rule ip keelson service-1 drop\nadd set ip keelson old-ips { type ipv4_addr; }\n\
             add element ip keelson old-ips { 10.96.0.1 }\n"
                .to_owned()
        }),
        (
            "sets that are missing",
            without(&own, &["map filtered", "set source-ranges"], &["@filtered", "@source-ranges"]),
        ),
        ("a set of another size", other_set("size 131072", "size 65535")?),
        (
            "a set of another type",
            other_set("set node-port-addresses {", "set node-port-addresses {\n\t\tflags interval")?,
        ),
        ("another priority", other_set("priority -101", "priority -99")?),
        ("another mark", other_set("0x00004000", "0x00000100")?),
    ];
    for (what, text) in older {
        eprintln!("{what}");
        env.proxy.kill9()?;
        load(&env, &text).context(what)?;
        let lines = env.dry_run().await?;
        ensure!(lines != ["no changes"], "{what} is not noticed");
        traffic.wait_for_answers().await.with_context(|| format!("by the rules with {what}"))?;
        env.proxy.start_again(world.node()).await?;
        env.wait_for_exact_services(&services).await.context(what)?;
        traffic.wait_for_answers().await.with_context(|| format!("{what} is put right"))?;
    }
    debug_assert!(services.iter().all(|service| service.at().port() == PORT));
    traffic.finish().await.map(drop)
}
