//! The page of a proxy, whose rules follow a real agent in the network of a node.

use std::sync::Arc;

use anyhow::{Result, ensure};
use keelson_cluster::manifests::ManifestFolder;
use keelson_cluster::net::{KeelsonProxy, KeelsonProxyOptions, World};
use keelson_harness::agent::{Agent, no_runtime};
use keelson_harness::scratch::Scratch;
use keelson_harness::util::free_port;
use serde_json::json;

use crate::{
    DESK, PHONE,
    browser::Browser,
    count,
    endpoints::{files, manifests},
    keep,
};

/// Inside of the proxy's network namespace.
const HTTP: &str = "127.0.0.1:9441";
/// Names of the series, and the titles of their plots.
const PLOTS: [(&str, &str); 4] = [
    ("sync_longest", "Longest sync"),
    ("syncs", "Syncs in 10 s"),
    ("revisions", "Revisions in 10 s"),
    ("changes", "Changes received in 10 s"),
];

/// A JavaScript expression: a part of the plot of a series.
fn plot(series: &str, part: &str) -> String {
    format!("document.querySelector(\"[data-key={series}] [data-part={part}]\").innerText")
}

/// A JavaScript expression: the line of the plot of a series.
fn line(series: &str) -> String {
    format!("document.querySelector(\"[data-key={series}] .stroke\").getAttribute('d')")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_of_a_proxy_plots_its_last_hour() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = ManifestFolder::new(scratch.dir("manifests")?);
    folder.write("shop.yaml", &manifests(3))?;
    let settings = files(folder.path());
    let mut agent = Agent::new_in(&scratch.dir("agent")?, free_port()?, &no_runtime(&scratch), &settings)?;
    agent.start_live().await?;
    let world = Arc::new(World::new()?);
    let options = KeelsonProxyOptions::new(&agent.endpoints_target()).set("proxy.http", HTTP);
    let _proxy = KeelsonProxy::start(&scratch, world.node(), &options).await?;
    let url = format!("http://{}/", world.reach_node(HTTP.parse()?).await?);

    let browser = Browser::start(&scratch, DESK).await?;
    browser.open(&url).await?;
    browser.until("document.getElementById('connection').dataset.state === 'live'").await?;
    browser.until("document.getElementById('services').innerText === '3'").await?;
    browser.until(&format!("{} === {}", count("#history .plot"), PLOTS.len())).await?;
    let shown = "[...document.querySelectorAll('#history .plot')]\
                 .map((plot) => [plot.dataset.key, plot.querySelector('[data-part=title]').innerText])";
    let shown = browser.eval(shown).await?;
    ensure!(shown == json!(PLOTS), "the plots are {shown}");
    // One sample is a point, a line to itself: a second one is at another place. No sync has no length, so its plot has gaps.
    for (series, _) in &PLOTS[1..] {
        browser.until(&format!(r"/^M([\d.]+),\S+ L(?!\1,)/.test({})", line(series))).await?;
    }
    // Nothing has changed for one sample.
    browser
        .until(&format!("{} === '0' && {} === '–'", plot("changes", "now"), plot("sync_longest", "now")))
        .await?;
    let before = browser.eval(&line("changes")).await?;
    keep(&browser, "proxy").await?;

    // Seven Services more, in one revision: each is a change, and its endpoints are another. If the sample ends in between, it has a
    // part of them, the next one has the rest, and seven others follow.
    let mut seen = Vec::new();
    while seen.last() != Some(&json!("14")) {
        ensure!(seen.len() < 5, "changes of seven Services are {seen:?}");
        let services = 10 + 7 * seen.len();
        browser.until(&format!("{} === '0'", plot("changes", "now"))).await?;
        folder.write("shop.yaml", &manifests(services))?;
        browser.until(&format!("document.getElementById('services').innerText === '{services}'")).await?;
        browser.until(&format!("{} !== '0'", plot("changes", "now"))).await?;
        seen.push(browser.eval(&plot("changes", "now")).await?);
    }
    for (series, at_least) in [("syncs", 1), ("revisions", 1)] {
        let now = browser.eval(&format!("Number({})", plot(series, "now"))).await?;
        ensure!(now.as_i64() >= Some(at_least), "{series} is {now}");
    }
    let longest =
        browser.eval(&format!(r"/^[\d.]+ (µs|ms|s)$/.test({})", plot("sync_longest", "now"))).await?;
    ensure!(longest == true, "the longest sync is {}", browser.eval(&plot("sync_longest", "now")).await?);
    ensure!(browser.eval(&line("changes")).await? != before, "the plot is what it was");
    keep(&browser, "proxy-changed").await?;
    // One sample later it has ended, and the plot still has it.
    browser.until(&format!("{} === '0'", plot("changes", "now"))).await?;
    ensure!(browser.eval(&plot("changes", "most")).await? == "at most 14", "the most is not the change");

    browser.look(PHONE).await?;
    browser.open(&url).await?;
    browser.until(&format!("{} === {}", count("#history .plot"), PLOTS.len())).await?;
    let fits = "document.documentElement.scrollWidth <= window.innerWidth";
    ensure!(browser.eval(fits).await? == true, "the page is wider than the window");
    keep(&browser, "proxy-phone").await?;
    let complaints = browser.complaints().await?;
    ensure!(complaints.is_empty(), "the browser complains: {complaints:?}");
    Ok(())
}
