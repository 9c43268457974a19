//! `--print` and `--dry-run`: their output is what a proxy does, and they change nothing.

use crate::common::{TestEnv, ensure_contains, eventually_slow, run_inside};
use crate::kernel;
use crate::model::{Service, meaning, pool};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::net::{Family, Namespace, Transport};
use keelson_harness::peers;
use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;

/// All features but IPv6 affinity, which nft 1.0.6 cannot load.
fn services() -> Vec<Service> {
    let mut all = Vec::new();
    for (index, family) in (0..).zip(Family::ALL) {
        let mut plain = Service::new(10 + index, family, &pool(family, 8080)[..4]);
        plain.node_port = Some(31_000 + index);
        plain.transports = Transport::ALL.into();
        plain.external.push(plain.own_external());
        all.extend([plain, Service::new(12 + index, family, &[])]);
    }
    let mut affine = Service::new(20, Family::V4, &pool(Family::V4, 8081));
    affine.affinity = Some(300);
    all.push(affine);
    all
}

/// A ruleset as blocks: rules in their order, elements sorted.
fn normal(listed: &str) -> Result<BTreeMap<String, String>> {
    let (mut blocks, mut table, mut block) = (BTreeMap::new(), String::new(), None::<(String, String)>);
    for line in listed.lines() {
        let words = line.trim();
        match (&mut block, line.strip_prefix("\t")) {
            (None, None) if words.ends_with('{') => words.clone_into(&mut table),
            (None, Some(_)) if words.ends_with('{') => {
                block = Some((format!("{table} {words}"), String::new()))
            }
            (Some(_), Some("}")) => {
                let (name, text) = block.take().context("a block ends")?;
                blocks.insert(name, with_sorted_elements(&text));
            }
            (Some((_, text)), _) => *text += &format!("{words}\n"),
            (None, _) => ensure!(words.is_empty() || words == "}", "a strange line: {line:?}"),
        }
    }
    Ok(blocks)
}

fn with_sorted_elements(text: &str) -> String {
    let Some((before, elements)) = text.split_once("elements = {") else { return text.to_owned() };
    let mut all: Vec<String> = elements
        .trim_end()
        .trim_end_matches('}')
        .split(',')
        .map(|element| element.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    all.sort();
    format!("{before}{}", all.join("\n"))
}

/// The ruleset of a separate namespace after loading this text.
fn loaded(env: &TestEnv, name: &str, text: &str) -> Result<BTreeMap<String, String>> {
    let fresh = Namespace::new(name)?;
    let file = env.scratch.path().join(format!("{name}.nft"));
    fs::write(&file, text)?;
    let file = file.display().to_string();
    fresh.nft(&["-c", "-f", &file])?;
    ensure!(fresh.nft(&["list", "ruleset"])?.is_empty(), "a check loads nothing");
    fresh.nft(&["-f", &file])?;
    // Loading it again replaces it.
    fresh.nft(&["-f", &file])?;
    normal(&fresh.nft(&["-s", "list", "ruleset"])?)
}

fn same(one: &BTreeMap<String, String>, other: &BTreeMap<String, String>) -> Result<()> {
    for name in one.keys().chain(other.keys()) {
        ensure!(
            one.get(name) == other.get(name),
            "{name}\n{:?}\nis not\n{:?}",
            one.get(name),
            other.get(name)
        );
    }
    ensure!(one.len() > 60, "{} blocks of two tables", one.len());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_printed_ruleset_equals_the_kernels() -> Result<()> {
    let services = services();
    let env = TestEnv::started(&services).await?;
    let programmed = normal(&env.node().nft(&["-s", "list", "ruleset"])?)?;
    let (keelson, socket) = (peers::keelson()?, format!("unix://{}", env.proxy.socket().display()));
    let running =
        run_inside(env.node(), &keelson, &["proxy", "print", "--socket", &socket]).await?.success()?.out;
    same(&loaded(&env, "running", &running)?, &programmed).context("keelson proxy print")?;
    let printed = env.print().await?;
    same(&loaded(&env, "printed", &printed)?, &programmed).context("keelson proxy --print")?;

    // Without an existing table, numbers may differ; the reference shows that the meaning is the same.
    let fresh = Namespace::new("fresh")?;
    let config = env.proxy.config().display().to_string();
    let args = ["proxy", "--config", &config, "--print"];
    let output = run_inside(&fresh, &keelson, &args).await?.success()?;
    let file = env.scratch.path().join("fresh.nft");
    fs::write(&file, &output.out)?;
    fresh.nft(&["-f", &file.display().to_string()])?;
    for family in Family::ALL {
        kernel::is(&fresh, family, &meaning(&services, family))?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_reports_changes_and_makes_none() -> Result<()> {
    let mut services = services();
    let mut env = TestEnv::new()?;
    for service in &services {
        service.write(&env.manifests)?;
    }
    env.agent.start_live().await?;
    let generation = kernel::generation(env.node())?;
    let lines = env.dry_run().await?.join("\n");
    let v = format!("add element ip keelson cluster-ip-ports {{ {} . tcp . 80 : ", services[0].ip());
    let refused =
        format!("add element ip6 keelson refused {{ {} . tcp . 80 : goto reject-it }}", services[3].ip());
    ensure_contains(
        &lines,
        &["add table ip keelson", "add table ip6 keelson", "add chain ip keelson lb-4", &v, &refused],
    )?;
    ensure!(env.node().nft(&["list", "tables"])?.is_empty() && kernel::generation(env.node())? == generation);

    env.proxy.start_again(env.world.node()).await?;
    env.wait_for_exact_services(&services).await?;
    env.proxy.kill9()?;
    let (generation, before) = (kernel::generation(env.node())?, env.node().nft(&["list", "ruleset"])?);
    let other = pool(Family::V4, 8080)[6];
    let former = std::mem::replace(&mut services[0].endpoints[3], other);
    services[0].write(&env.manifests)?;
    let lines = eventually_slow("the agent has read it", || async {
        let lines = env.dry_run().await?;
        ensure!(lines != ["no changes"], "it has not");
        Ok(lines)
    })
    .await?;
    // TCP, UDP and SCTP each have a separate number.
    ensure!(lines.len() == 6, "{lines:#?}");
    let ends = |verb: &str, at: SocketAddr| {
        let end = format!(" : {} . {} }}", at.ip(), at.port());
        lines
            .iter()
            .filter(|line| line.starts_with(verb) && line.contains(" slots ") && line.ends_with(&end))
            .count()
    };
    ensure!(ends("delete element ip", former) == 3 && ends("add element ip", other) == 3, "{lines:#?}");
    ensure!(kernel::generation(env.node())? == generation, "it does nothing");
    ensure!(env.node().nft(&["list", "ruleset"])? == before);
    env.proxy.start_again(env.world.node()).await?;
    env.wait_for_exact_services(&services).await
}
