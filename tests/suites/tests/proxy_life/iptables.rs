//! The life of a proxy with the backend iptables, in both variants.

use crate::any_backend::{Backend, changes, drift, kills, started, upgrade};
use crate::backends::{connections_outlive_the_change_to_user_space, services, takes_over};
use crate::kills::staying;
use crate::traffic::Traffic;
use anyhow::{Context as _, Result, ensure};
use keelson_harness::peers;

const LEGACY: Backend = &[("proxy.backend", "iptables"), ("proxy.iptables_variant", "legacy")];
const NFT: Backend = &[("proxy.backend", "iptables"), ("proxy.iptables_variant", "nft")];
const KILLS: usize = 18;
/// Changes per second.
const RATE: u32 = 100;

#[tokio::test(flavor = "multi_thread")]
async fn eighteen_kills_with_iptables_legacy_leave_the_rules_of_a_fresh_start() -> Result<()> {
    kills(LEGACY, KILLS).await
}

#[tokio::test(flavor = "multi_thread")]
async fn eighteen_kills_with_iptables_nft_leave_the_rules_of_a_fresh_start() -> Result<()> {
    kills(NFT, KILLS).await
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_continue_under_changes_with_iptables_legacy() -> Result<()> {
    changes(LEGACY, RATE).await
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_continue_under_changes_with_iptables_nft() -> Result<()> {
    changes(NFT, RATE).await
}

/// The arguments of `iptables` and of `ipset` that make rules as of another version.
const OLDER: [&str; 4] = [
    "-w 5 -t nat -N KEELSON-OLD",
    "-w 5 -t nat -I KEELSON-SERVICES -p udp",
    "-w 5 -t filter -I KEELSON-FORWARD -p tcp",
    "-w 5 -t nat -D POSTROUTING -j KEELSON-POSTROUTING",
];

async fn replaces_older(backend: Backend, program: &'static str) -> Result<()> {
    let mut older = OLDER.map(|args| (program, "iptables", args)).to_vec();
    older.push(("ipset", "ipset", "create KEELSON-4-OLD hash:ip"));
    upgrade(backend, &older).await
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_of_another_version_are_replaced_with_iptables_legacy() -> Result<()> {
    replaces_older(LEGACY, "iptables-legacy").await
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_of_another_version_are_replaced_with_iptables_nft() -> Result<()> {
    replaces_older(NFT, "iptables-nft").await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_variant_is_switched_under_load() -> Result<()> {
    let staying = staying();
    let mut env = started(LEGACY, &staying).await?;
    let world = env.world.clone();
    let traffic = Traffic::start(&world, &staying)?;
    traffic.wait_for_answers().await?;
    let rules = |variant: &str| {
        let save = peers::system(&format!("iptables-{variant}-save"), "iptables")?;
        world.node().command(&save, &[])
    };
    for (from, to) in [("legacy", "nft"), ("nft", "legacy")] {
        ensure!(env.proxy.terminate().await?.success(), "it exits with success after SIGTERM");
        env.options = env.options.clone().set("proxy.iptables_variant", to);
        env.proxy.configure(&env.options)?;
        env.proxy.start_again(world.node()).await?;
        env.wait_for_exact_services(&staying).await?;
        traffic.wait_for_answers().await.with_context(|| format!("from {from} to {to}"))?;
        ensure!(rules(to)?.contains("KEELSON-"), "{to} has no rules");
        ensure!(!rules(from)?.contains("KEELSON-"), "{from} has rules");
    }
    traffic.finish().await.map(drop)
}

/// What the proxy has read when it starts is nothing.
async fn chains_of_a_kube_proxy_are_removed(backend: Backend, variant: &str) -> Result<()> {
    let staying = staying();
    let mut env = started(backend, &staying).await?;
    ensure!(env.proxy.terminate().await?.success());
    let iptables = peers::system(&format!("iptables-{variant}"), "iptables")?;
    for args in ["-N KUBE-SERVICES", "-A PREROUTING -j KUBE-SERVICES"] {
        let args: Vec<&str> = ["-w", "5", "-t", "nat"].into_iter().chain(args.split(' ')).collect();
        env.node().command(&iptables, &args)?;
    }
    env.proxy.start_again(env.world.node()).await?;
    takes_over(&env, "iptables", "kube-proxy").await?;
    let left = env.node().command(&iptables, &["-w", "5", "-t", "nat", "-S"])?;
    ensure!(!left.contains("KUBE-") && left.contains("KEELSON-"), "{left}");
    env.wait_for_exact_services(&staying).await
}

#[tokio::test(flavor = "multi_thread")]
async fn chains_of_a_kube_proxy_are_removed_with_iptables_legacy() -> Result<()> {
    chains_of_a_kube_proxy_are_removed(LEGACY, "legacy").await
}

#[tokio::test(flavor = "multi_thread")]
async fn chains_of_a_kube_proxy_are_removed_with_iptables_nft() -> Result<()> {
    chains_of_a_kube_proxy_are_removed(NFT, "nft").await
}

/// With the last rule that asks conntrack, the kernel stops to translate.
#[tokio::test(flavor = "multi_thread")]
async fn established_connections_outlive_the_change_to_user_space_from_iptables_nft() -> Result<()> {
    let services = services();
    let env = started(NFT, &services).await?;
    connections_outlive_the_change_to_user_space(env, &services, "iptables").await
}

/// Another program empties the table nat, and then every IP set.
async fn removed_rules_are_repaired(backend: Backend, program: &'static str) -> Result<()> {
    drift(backend, &[(program, "iptables", "-t nat -F"), ("ipset", "ipset", "flush")]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn removed_rules_are_repaired_with_iptables_legacy() -> Result<()> {
    removed_rules_are_repaired(LEGACY, "iptables-legacy").await
}

#[tokio::test(flavor = "multi_thread")]
async fn removed_rules_are_repaired_with_iptables_nft() -> Result<()> {
    removed_rules_are_repaired(NFT, "iptables-nft").await
}
