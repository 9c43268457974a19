//! The life of a proxy with the backend ebpf.

use crate::any_backend::{Backend, changes, kills, started};
use crate::backends::{change_over, services};
use crate::common::{TestEnv, ensure_contains, eventually_slow, family_of};
use crate::kills::staying;
use crate::model::{Service, pool};
use crate::restarts::{self, bound};
use crate::traffic::Traffic;
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::net::{Family, Outcome, Transport};
use keelson_harness::util::PATIENCE;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

const EBPF: Backend = &[("proxy.backend", "ebpf")];
const KILLS: usize = 18;
/// Changes per second.
const RATE: u32 = 100;

#[tokio::test(flavor = "multi_thread")]
async fn eighteen_kills_with_ebpf_leave_the_maps_of_a_fresh_start() -> Result<()> {
    kills(EBPF, KILLS).await
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_continue_under_changes_with_ebpf() -> Result<()> {
    changes(EBPF, RATE).await
}

/// The pins of the proxy: folders of maps and links.
pub(crate) fn pins(env: &TestEnv) -> Result<Vec<PathBuf>> {
    let inode = fs::metadata(Path::new("/run/netns").join(env.node().name()))?.ino();
    let own = env.world.bpf()?.join(format!("keelson/netns-{inode}"));
    let mut found: Vec<PathBuf> =
        fs::read_dir(own).into_iter().flatten().flatten().map(|folder| folder.path()).collect();
    found.sort();
    Ok(found)
}

/// Only programs translate here: packets to the address find no rule.
async fn asks(env: &TestEnv, service: &Service) -> Result<Outcome> {
    env.world.pod().ask(service.at(), Transport::Tcp, PATIENCE).await
}

#[tokio::test(flavor = "multi_thread")]
async fn removed_programs_and_tables_come_back() -> Result<()> {
    let staying = staying();
    let env = started(EBPF, &staying).await?;
    let repaired = async || env.family(Family::V4).await?["repaired"].as_u64().context("no count");
    let links = pins(&env)?.into_iter().find(|path| path.display().to_string().contains("links-"));
    let links = links.context("no links")?;
    for remove in [&|| fs::remove_file(links.join("connect4")).context("a link") as Result<()>, &|| {
        env.node().nft(&["delete", "table", "ip", "keelson"]).map(drop)
    }] as [&(dyn Fn() -> Result<()> + Sync); 2]
    {
        let before = repaired().await?;
        remove()?;
        eventually_slow("it is repaired", || async {
            ensure!(repaired().await? > before);
            Ok(())
        })
        .await
        .with_context(|| env.logs())?;
        ensure!(links.join("connect4").exists());
    }
    env.wait_for_exact_services(&staying).await?;
    Traffic::start(&env.world, &staying)?.finish().await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn ebpf_takes_over_from_nft_and_nft_from_ebpf_without_a_lost_connection() -> Result<()> {
    let services = services();
    let mut env = TestEnv::started_at_sockets(&services).await?;
    let traffic = Traffic::start(&env.world, &services)?;
    traffic.wait_for_answers().await?;
    change_over(&mut env, "nft", "ebpf").await?;
    ensure!(pins(&env)?.is_empty(), "{:?}", pins(&env)?);
    let tables = env.node().nft(&["list", "tables"])?;
    ensure_contains(&tables, &["table ip keelson", "table ip6 keelson"])?;
    traffic.wait_for_answers().await?;
    // The tables are a part of the backend ebpf, and are kept.
    ensure!(env.proxy.terminate().await?.success());
    env.proxy.configure(&env.options)?;
    env.proxy.start_again(env.world.node()).await?;
    env.wait_for_exact_services(&services).await?;
    ensure!(pins(&env)?.len() == 2, "{:?}", pins(&env)?);
    let state = env.state().await?;
    ensure!(state["take_overs"].as_array().is_none_or(Vec::is_empty), "{state}");
    traffic.finish().await?;
    change_over(&mut env, "iptables", "nft").await?;
    ensure!(pins(&env)?.is_empty(), "{:?}", pins(&env)?);
    Ok(())
}

/// Sockets that programs have translated do not need them; new connections need rules.
#[tokio::test(flavor = "multi_thread")]
async fn a_clean_up_leaves_nothing_and_ends_no_connection() -> Result<()> {
    let services = services();
    let mut env = TestEnv::started_at_sockets(&services).await?;
    let mut traffic = Traffic::none(&env.world)?;
    for service in &services {
        let (client, valid) = (env.world.pod().clone(), service.endpoints.clone());
        traffic.open_flow(client, service.at(), Transport::Tcp, valid);
    }
    traffic.wait_for_answers().await?;
    let explained = env.proxy_command(&["explain", &services[0].at().to_string()]).await?.success()?;
    ensure_contains(&explained.out, &["socket level: program keelson_connect4", "map frontends"])?;
    ensure!(env.proxy.terminate().await?.success());
    ensure!(matches!(asks(&env, &services[0]).await?, Outcome::Answered { .. }), "without a process");
    let removed = env.cleanup(&[]).await?.join("\n");
    ensure_contains(&removed, &["/sys/fs/bpf/keelson/netns-", "removed table ip keelson"])?;
    ensure!(pins(&env)?.is_empty(), "{:?}", pins(&env)?);
    ensure!(env.node().nft(&["list", "tables"])?.is_empty());
    traffic.wait_for_answers().await?;
    traffic.finish().await?;
    ensure!(env.cleanup(&[]).await? == ["nothing to remove"]);
    Ok(())
}

/// Pins of a version with another layout and other programs.
#[tokio::test(flavor = "multi_thread")]
async fn pins_of_another_version_are_removed() -> Result<()> {
    let staying = staying();
    let mut env = started(EBPF, &staying).await?;
    let own = pins(&env)?;
    let parent = own[0].parent().context("a folder")?.to_owned();
    env.proxy.kill9()?;
    for name in ["maps-0-00000000", "links-00000000"] {
        fs::create_dir(parent.join(name))?;
    }
    let lines = env.dry_run().await?;
    ensure!(lines.len() == 2 && lines.iter().all(|line| line.starts_with("remove ")), "{lines:?}");
    env.proxy.start_again(env.world.node()).await?;
    env.wait_for_exact_services(&staying).await?;
    ensure!(pins(&env)? == own);
    Ok(())
}

/// Restarts of the same version write nothing; what clients have, affinity included, stays.
#[tokio::test(flavor = "multi_thread")]
async fn restarts_with_ebpf_change_nothing_and_break_no_connection() -> Result<()> {
    let services = restarts::services();
    let mut env = TestEnv::started_at_sockets(&services).await?;
    let world = env.world.clone();
    let traffic = Traffic::start(&world, &services)?;
    let bound_to = bound(&world, &services).await?;
    let own = pins(&env)?;
    for round in 0..4 {
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
        ensure!(bound(&world, &services).await? == bound_to, "affinity is kept");
        ensure!(pins(&env)? == own, "the same maps and programs");
    }
    env.wait_for_exact_services(&services).await?;
    traffic.finish().await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_with_ipv6_disabled_serves_ipv4_with_ebpf() -> Result<()> {
    let service = Service::new(10, Family::V4, &pool(Family::V4, 8080)[..4]);
    let mut env = TestEnv::at_sockets()?;
    env.node().sysctl(&[("ipv6/conf/all/disable_ipv6", "1")])?;
    service.write(&env.manifests)?;
    env.agent.start_live().await?;
    env.proxy.start_again(env.world.node()).await?;
    let state = eventually_slow("the proxy is healthy", || async {
        let output = env.state_command().await?;
        ensure!(output.code == Some(0), "{output:?}");
        env.state().await
    })
    .await
    .with_context(|| env.logs())?;
    ensure!(family_of(&state, Family::V4)?["state"] == "synced", "{state}");
    ensure!(family_of(&state, Family::V6)?["state"] == "disabled", "{state}");
    let explained = env.proxy_command(&["explain", &service.at().to_string()]).await?.success()?;
    ensure_contains(&explained.out, &["socket level: program keelson_connect4"])?;
    Traffic::start(&env.world, std::slice::from_ref(&service))?.finish().await.map(drop)
}

/// `auto` prefers ebpf where it can be opened and suits the settings, and changes over without a lost connection.
#[tokio::test(flavor = "multi_thread")]
async fn auto_chooses_ebpf_and_falls_back_to_nft() -> Result<()> {
    let services = services();
    let mut env = TestEnv::at_sockets()?;
    let options = env.options.clone().set("proxy.backend", "auto");
    // A node that nft has served.
    env.proxy.configure(&options.clone().set("proxy.backend", "nft"))?;
    env.start(&services).await?;
    let traffic = Traffic::start(&env.world, &services)?;
    traffic.wait_for_answers().await?;
    let masqueraded = options.clone().set("proxy.masquerade_all", true);
    for (options, backend, text) in [
        (&options, "ebpf", "auto chose ebpf, the first choice"),
        (&masqueraded, "nft", "auto chose nft (ebpf: with proxy.masquerade_all no connection is translated"),
        (&options, "ebpf", "auto chose ebpf, the first choice"),
    ] {
        ensure!(env.proxy.terminate().await?.success());
        env.proxy.configure(options)?;
        env.proxy.start_again(env.world.node()).await?;
        let state = env.synced().await?;
        ensure!(state["backend"] == backend, "{state}");
        ensure_contains(&env.events().await?.join("\n"), &[text])?;
        env.wait_for_exact_services(&services).await?;
        // From nft nothing is removed: its tables are a part of ebpf.
        eventually_slow("pins are there with ebpf alone", || async {
            let found = pins(&env)?;
            ensure!(found.is_empty() == (backend == "nft"), "{backend}: {found:?}");
            Ok(())
        })
        .await?;
        traffic.wait_for_answers().await?;
    }
    traffic.finish().await.map(drop)
}
