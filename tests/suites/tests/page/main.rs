//! The pages of agent and proxy in a real browser, with a real agent that pulls real images.
//!
//! If `KEELSON_PICTURES` names a folder, the screenshots are stored there.

mod browser;
mod endpoints;
mod proxy;

use anyhow::{Context as _, Result, ensure};
use browser::{Browser, Viewport};
use keelson_cluster::kube::Cluster;
use keelson_harness::{
    agent::Settings,
    containerd::{Kind, Options},
    images::ImageSpec,
    node::Node,
    registry::Access,
    registry_proxy::{Fault, Match},
};

const DESK: Viewport = Viewport { width: 1280, height: 1000, dark: false };
const NIGHT: Viewport = Viewport { width: 1280, height: 1000, dark: true };
const PHONE: Viewport = Viewport { width: 390, height: 1400, dark: false };

/// A JavaScript expression: the number of elements that match a selector.
fn count(selector: &str) -> String {
    format!("document.querySelectorAll({selector:?}).length")
}

async fn keep(browser: &Browser, name: &str) -> Result<()> {
    let picture = browser.picture(false).await?;
    ensure!(picture.starts_with(b"\x89PNG"), "the picture is no PNG");
    if let Some(folder) = std::env::var_os("KEELSON_PICTURES") {
        std::fs::create_dir_all(&folder)?;
        std::fs::write(std::path::Path::new(&folder).join(format!("{name}.png")), picture)?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_follows_pulls_and_restarts_of_the_agent() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let specs: Vec<ImageSpec> =
        (0..5).map(|n| ImageSpec::new(&format!("page/image-{n}"), &[3 << 20, 2 << 20])).collect();
    let images = node.push(&specs).await?;
    // After their first two megabytes the layers wait until the rule is removed.
    let stalled = node.proxy.rule(Match::layers(), Fault::StallAfter(2 << 20));
    let mut agent = node.agent(&Settings::limit(2)).await?;
    let cri = agent.cri().await?;
    let mut pulls = tokio::task::JoinSet::new();
    for image in &images {
        let (cri, name) = (cri.clone(), node.name(image));
        pulls.spawn(async move { cri.pull_image(&name).await });
    }
    let browser = Browser::start(&node.scratch, DESK).await?;
    browser.open(&agent.url()).await?;
    browser.until("document.getElementById('connection').dataset.state === 'live'").await?;
    browser.until(&format!("{} === 2", count("#running [data-pull-id]"))).await?;
    browser.until(&format!("{} === 3", count("#queue [data-pull-id]"))).await?;
    // The jobs that hold sockets are listed with them.
    for actor in ["PullCoordinator", "RuntimeClient", "LeaseRenewer", "StatusReporter", "EndpointPublisher"] {
        browser.until(&format!("{} === 1", count(&format!("[data-actor={actor}]")))).await?;
    }
    // Bytes are shown, with a known total.
    browser.until("/MiB of 5\\.\\d MiB/.test(document.getElementById('running').innerText)").await?;
    ensure!(
        browser.eval("document.body.innerText.includes('page/image-0')").await? == true,
        "the image is named"
    );
    // A line needs two samples, and the second one comes after ten seconds.
    browser.until(&format!("{} === 4", count("#history .plot"))).await?;
    // One sample is a point: a line to itself.
    let line = r"/^M([\d.]+),\S+ L(?!\1,)/";
    browser
        .until(&format!("{line}.test(document.querySelector('[data-key=queued] .stroke').getAttribute('d'))"))
        .await?;
    browser.until("document.querySelector('[data-key=queued] [data-part=now]').innerText === '3'").await?;
    browser
        .until("document.querySelector('[data-key=running] [data-part=most]').innerText === 'at most 2'")
        .await?;
    keep(&browser, "desk").await?;
    for (look, name) in [(NIGHT, "night"), (PHONE, "phone")] {
        browser.look(look).await?;
        browser.open(&agent.url()).await?;
        browser.until(&format!("{} === 2", count("#running [data-pull-id]"))).await?;
        ensure!(browser.eval("window.innerWidth").await? == look.width, "{name}: it has another width");
        let fits = "document.documentElement.scrollWidth <= window.innerWidth";
        ensure!(browser.eval(fits).await? == true, "{name}: the page is wider than the window");
        let dark = browser.eval("matchMedia('(prefers-color-scheme: dark)').matches").await?;
        ensure!(dark == look.dark, "{name}: the colour scheme is not the one asked for");
        keep(&browser, name).await?;
    }
    browser.look(DESK).await?;

    // Only the agent's own end makes the page report that it is gone.
    agent.kill9()?;
    browser.until("document.getElementById('connection').dataset.state === 'lost'").await?;
    keep(&browser, "lost").await?;
    while pulls.join_next().await.is_some() {}
    agent.start_again().await?;
    browser.until("document.getElementById('connection').dataset.state === 'live'").await?;
    // All five are anonymous: the agent finishes them without callers.
    browser.until(&format!("{} === 2", count("#running [data-pull-id]"))).await?;
    node.proxy.remove(stalled);
    browser.until(&format!("{} === 5", count("#finished [data-state='succeeded']"))).await?;
    browser.until(&format!("{} === 0", count("#running [data-pull-id]"))).await?;
    keep(&browser, "done").await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_loads_no_external_resources_and_escapes_names() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let agent = node.agent(&Settings::limit(1)).await?;
    node.proxy.rule(Match::any(), Fault::Hang);
    let cri = agent.cri().await?;
    // The longest name that matches the grammar, and a pod whose name is markup.
    let name = format!("{}/{}", node.proxy.address(), "long-".repeat(45) + "name");
    let pull = keelson_harness::cri::Pull::new(&name).pod("<img src=x onerror=window.pwned=1>", "uid-1");
    let waiting = tokio::spawn(async move { cri.pull(&pull).await });
    let browser = Browser::start(&node.scratch, PHONE).await?;
    browser.open(&agent.url()).await?;
    browser.until(&format!("{} === 1", count("#running [data-pull-id]"))).await?;
    browser.until("document.getElementById('running').innerText.includes('onerror')").await?;
    ensure!(browser.eval("typeof window.pwned").await? == "undefined", "markup from a pod's name ran");
    let fits = "document.documentElement.scrollWidth <= window.innerWidth";
    ensure!(browser.eval(fits).await? == true, "a long name makes the page wider than the window");
    let foreign =
        "performance.getEntriesByType('resource').filter(r => !r.name.startsWith(location.origin)).length";
    ensure!(browser.eval(foreign).await? == 0, "the page loads something from elsewhere");
    let complaints = browser.complaints().await.context("the browser's log")?;
    ensure!(complaints.is_empty(), "the browser complains: {complaints:?}");
    browser.eval("document.querySelector('[data-actor] .toggle').click() ?? true").await?;
    browser.until("/\"limit\": 1|\"calls_in_flight\"/.test(document.body.innerText)").await?;
    keep(&browser, "actor").await?;
    waiting.abort();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_shows_healthy_failing_and_disabled_heartbeats() -> Result<()> {
    let options = Options { network: true, ..Options::default() };
    let node = Node::start_with(Kind::V2, Access::Anonymous, &options).await?;
    let mut cluster = Cluster::start(&node.scratch).await?;
    let identity = cluster.node(&node.scratch, "paged").await?;
    let settings = Settings::new()
        .set("agent.node_name", "paged")
        .set("kube.kubeconfig", identity.kubeconfig().display().to_string())
        .set("endpoints.source", "off")
        .set("kube.request_timeout", "2s")
        .set("node.role", "node")
        .set("node.root_dir", node.scratch.path().display().to_string());
    let agent = node.agent(&settings).await?;
    let browser = Browser::start(&node.scratch, DESK).await?;
    browser.open(&agent.url()).await?;
    browser.until("document.getElementById('beat').innerText === 'healthy'").await?;
    browser
        .until("/Ready[\\s\\S]*KubeletReady/.test(document.getElementById('conditions').innerText)")
        .await?;
    ensure!(browser.eval("document.getElementById('role').innerText").await? == "node", "the role is shown");
    keep(&browser, "heartbeats").await?;
    // The next renewal finds no server.
    cluster.api.kill9()?;
    browser.until("document.getElementById('beat').innerText.startsWith('failing for')").await?;
    keep(&browser, "heartbeats-failing").await?;
    cluster.api.start_again().await?;
    browser.until("document.getElementById('beat').innerText === 'healthy'").await?;

    let off = node.agent(&Settings::new()).await?;
    browser.open(&off.url()).await?;
    browser
        .until("document.getElementById('heartbeats-off').innerText.startsWith('Disabled: no API server')")
        .await?;
    ensure!(
        browser.eval("document.getElementById('heartbeats').hidden").await? == true,
        "nothing else is shown"
    );
    Ok(())
}
