//! The page's section on service endpoints, with agents that read manifests, or have endpoints disabled.

use std::path::Path;

use anyhow::{Result, ensure};
use keelson_client::{Backend, Reported, Reporter};
use keelson_cluster::manifests::ManifestFolder;
use keelson_harness::{agent::Settings, containerd::Kind, node::Node};

use crate::{
    DESK, PHONE,
    browser::{Browser, Viewport},
    count, keep,
};

async fn opened(node: &Node, look: Viewport, url: &str) -> Result<Browser> {
    let browser = Browser::start(&node.scratch, look).await?;
    browser.open(url).await?;
    browser.until("document.getElementById('connection').dataset.state === 'live'").await?;
    Ok(browser)
}

/// Services `web-0000` and following, each with one endpoint on this node and one on another.
pub(crate) fn manifests(services: usize) -> String {
    let service = |number: usize| {
        let (high, low) = (number / 250, number % 250 + 1);
        format!(
            "apiVersion: v1\n\
             kind: Service\n\
             metadata: {{name: web-{number:04}, namespace: shop}}\n\
             spec:\n  type: ClusterIP\n  clusterIP: 10.96.{high}.{low}\n  clusterIPs: [10.96.{high}.{low}]\n  \
             ipFamilies: [IPv4]\n  ports: [{{name: http, port: 80, protocol: TCP}}]\n\
             ---\n\
             apiVersion: discovery.k8s.io/v1\n\
             kind: EndpointSlice\n\
             metadata:\n  name: web-{number:04}-a\n  namespace: shop\n  labels: {{kubernetes.io/service-name: web-{number:04}}}\n\
             addressType: IPv4\n\
             ports: [{{name: http, port: 8080, protocol: TCP}}]\n\
             endpoints:\n\
             - {{addresses: [10.180.{high}.{low}], nodeName: node, conditions: {{ready: true}}}}\n\
             - {{addresses: [10.181.{high}.{low}], nodeName: other, conditions: {{ready: false}}}}\n"
        )
    };
    (0..services).map(service).collect::<Vec<_>>().join("---\n")
}

pub(crate) fn files(folder: &Path) -> Settings {
    Settings::new().set("endpoints.source", "files").set("endpoints.manifests", folder.display().to_string())
}

fn shows(id: &str, part: &str) -> String {
    format!("document.getElementById('{id}').innerText.includes({part:?})")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_shows_services_endpoint_reasons_and_broken_manifests() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let folder = ManifestFolder::new(node.scratch.dir("manifests")?);
    folder.write("shop.yaml", &manifests(300))?;
    let agent = node.agent(&files(folder.path())).await?;
    let browser = opened(&node, DESK, &agent.url()).await?;
    browser.until("document.getElementById('endpoints-state').innerText === 'synced'").await?;
    browser.until(&shows("endpoints-services", "300 Services")).await?;
    browser.until(&shows("endpoints-source-note", &folder.path().display().to_string())).await?;
    // The page holds a bounded number of them.
    browser.until(&format!("{} === 200", count("[data-service]"))).await?;
    browser.until(&shows("services-count", "300 Services, first 200 shown")).await?;
    keep(&browser, "endpoints").await?;

    // One that is not among them is found.
    browser.eval(
        "((field) => { field.value = 'SHOP/web-0299'; field.dispatchEvent(new Event('input')); return true; })\
         (document.getElementById('services-filter'))",
    )
    .await?;
    browser.until(&format!("{} === 1", count("[data-service='shop/web-0299']"))).await?;
    browser.until(&shows("services-count", "1 of 300 Services found")).await?;
    browser.eval("document.querySelector('[data-service] .toggle').click() ?? true").await?;
    let explained = |part: &str| {
        format!("(document.querySelector('[data-service] .explanation')?.innerText ?? '').includes({part:?})")
    };
    browser.until(&explained("10.180.1.50:8080")).await?;
    browser.until(&explained("node (this node)")).await?;
    let chosen = |yes: bool| count(&format!("[data-service] .explained [data-chosen='{yes}']"));
    browser.until(&format!("{} === 1", chosen(true))).await?;
    ensure!(
        browser.eval(&chosen(false)).await? == 1,
        "the endpoint that is not ready is shown with its reason"
    );
    keep(&browser, "endpoints-explained").await?;

    // A change is shown without a reload.
    folder.write("shop.yaml", &manifests(300).replace("ready: false", "ready: true"))?;
    browser.until(&format!("{} === 2", chosen(true))).await?;

    // A broken manifest is named, its last valid version is kept, and its text is not interpreted as markup.
    folder.write("shop.yaml", "kind: Service\nmetadata: {name: web\n")?;
    folder.write("<img src=x onerror=window.pwned=1>.yaml", "kind: [\n")?;
    browser.until(&shows("faults", "shop.yaml")).await?;
    browser.until(&shows("faults", "onerror=window.pwned=1>.yaml")).await?;
    browser.until(&shows("faults-title", "2 invalid manifests")).await?;
    ensure!(
        browser.eval(&shows("endpoints-services", "300 Services")).await? == true,
        "the good version is gone"
    );
    ensure!(browser.eval("typeof window.pwned").await? == "undefined", "markup from a manifest's name ran");
    keep(&browser, "endpoints-broken").await?;

    browser.look(PHONE).await?;
    browser.open(&format!("{}#service/shop/web-0007", agent.url())).await?;
    browser.until("document.querySelector(\"[data-service='shop/web-0007'] .explanation\") !== null").await?;
    let fits = "document.documentElement.scrollWidth <= window.innerWidth";
    ensure!(browser.eval(fits).await? == true, "the page is wider than the window");
    keep(&browser, "endpoints-phone").await?;
    let complaints = browser.complaints().await?;
    ensure!(complaints.is_empty(), "the browser complains: {complaints:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_explains_how_to_enable_endpoints() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let agent = node.agent(&Settings::new().set("endpoints.source", "off")).await?;
    let browser = opened(&node, DESK, &agent.url()).await?;
    browser
        .until(&format!(
            "/^Disabled: ./.test({})",
            "document.getElementById('endpoints-off-reason').innerText"
        ))
        .await?;
    browser.until(&shows("endpoints-off", "source = \"files\"")).await?;
    ensure!(
        browser.eval("document.getElementById('endpoints').hidden").await? == true,
        "nothing else is shown"
    );
    Ok(())
}

/// A JavaScript expression: whether a row of backends has this text in this part.
fn row(name: &str, part: &str, text: &str) -> String {
    let selector = format!("[data-backend='{name}'] [data-part='{part}']");
    format!("(document.querySelector({selector:?})?.innerText ?? '').includes({text:?})")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_shows_backends_and_failing_or_silent_ones() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let folder = ManifestFolder::new(node.scratch.dir("manifests")?);
    folder.write("shop.yaml", &manifests(1))?;
    let agent = node.agent(&files(folder.path())).await?;
    let browser = opened(&node, DESK, &agent.url()).await?;
    browser.until("document.getElementById('endpoints-state').innerText === 'synced'").await?;
    ensure!(browser.eval("document.getElementById('backends-part').hidden").await? == true, "there are none");

    let state = agent.json("/debug/endpoints?max=0").await?;
    let instance_id: u64 = state["instance_id"].as_str().unwrap_or_default().parse()?;
    let mut reporter = Reporter::new(agent.endpoints_target().parse()?);
    let nft = Backend {
        name: "nft".into(),
        pid: std::process::id(),
        version: "9.9.9".into(),
        debug: "unix:///run/keelson-proxy/proxy.sock".into(),
        http: "http://127.0.0.1:9441/".into(),
        instance_id,
        rev: state["rev"].as_u64().unwrap_or_default(),
        state: "synced".into(),
        last_sync_unix_ms: state["published_unix_ms"].as_i64().unwrap_or_default(),
        service_ports: 3,
        ..Backend::default()
    };
    let markup = "no set <img src=x onerror=window.pwned=1>";
    let failing = Backend {
        name: "failing".into(),
        pid: 1,
        state: "failing".into(),
        reason: markup.into(),
        instance_id: 0,
        rev: 0,
        http: String::new(),
        ..nft.clone()
    };
    for backend in [&nft, &failing] {
        ensure!(reporter.report(backend.clone()).await? == Reported::Accepted);
    }
    browser.until(&shows("backends-title", "2 backends, 1 failing or not reporting")).await?;
    browser.until(&row("nft", "health", "synced")).await?;
    browser.until(&row("nft", "who", "9.9.9 · 3 service ports")).await?;
    browser.until(&row("nft", "rev", &format!("at {}", nft.rev))).await?;
    browser.until(&row("nft", "sync", " ago")).await?;
    browser.until(&row("nft", "debug", "unix:///run/keelson-proxy/proxy.sock")).await?;
    let link = "document.querySelector(\"[data-backend='nft'] a\").href === 'http://127.0.0.1:9441/'";
    ensure!(browser.eval(link).await? == true, "the link leads elsewhere");
    browser.until(&row("failing", "why", markup)).await?;
    browser.until(&row("failing", "rev", "none yet")).await?;
    let red = |name: &str| {
        let colour = |of: &str| format!("getComputedStyle({of}).color");
        let health = format!("document.querySelector(\"[data-backend='{name}'] [data-part='health']\")");
        format!("{} === {}", colour(&health), colour("document.querySelector('#backends-title.error')"))
    };
    ensure!(browser.eval(&red("failing")).await? == true, "the one that fails is not red");
    ensure!(browser.eval(&red("nft")).await? == false, "the healthy one is red");
    let no_link = "document.querySelector(\"[data-backend='failing'] a\").hidden";
    ensure!(browser.eval(no_link).await? == true, "there is a link to nowhere");
    ensure!(browser.eval("typeof window.pwned").await? == "undefined", "markup of a reason ran");
    keep(&browser, "endpoints-backends").await?;

    browser.look(PHONE).await?;
    browser.open(&agent.url()).await?;
    browser.until(&row("nft", "health", "synced")).await?;
    let fits = "document.documentElement.scrollWidth <= window.innerWidth";
    ensure!(browser.eval(fits).await? == true, "the page is wider than the window");
    browser.eval("document.getElementById('backends-part').scrollIntoView() ?? true").await?;
    keep(&browser, "endpoints-backends-phone").await?;
    browser.look(DESK).await?;

    // One keeps reporting, the other stops: shown after half a minute.
    let reports = tokio::spawn(async move {
        while reporter
            .report(Backend { state: "synced".into(), reason: String::new(), ..failing.clone() })
            .await
            .is_ok()
        {
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        }
    });
    browser.until(&row("nft", "health", "no report for ")).await?;
    browser.until(&row("nft", "why", "last state synced")).await?;
    browser.until(&row("failing", "health", "synced")).await?;
    ensure!(browser.eval(&red("nft")).await? == true, "the silent one is not red");
    reports.abort();
    let complaints = browser.complaints().await?;
    ensure!(complaints.is_empty(), "the browser complains: {complaints:?}");
    Ok(())
}
