//! The page's section on service endpoints, before agents that read manifests, or nothing.

use std::{fs, path::Path};

use anyhow::{Result, ensure};
use keelson_tests::{agent::Settings, containerd::Kind, node::Node};

use crate::{
    DESK, PHONE,
    browser::{Browser, Look},
    count, keep,
};

/// A browser that shows an agent's page.
async fn opened(node: &Node, look: Look, url: &str) -> Result<Browser> {
    let browser = Browser::start(&node.scratch, look).await?;
    browser.open(url).await?;
    browser.until("document.getElementById('connection').dataset.state === 'live'").await?;
    Ok(browser)
}

/// Services `web-0000` and so on, of which each has an endpoint on this node and one elsewhere.
fn manifests(services: usize) -> String {
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

/// Puts a file there at once, as careful writers do.
fn write(folder: &Path, name: &str, text: &str) -> Result<()> {
    let part = folder.join(format!(".{name}.part"));
    fs::write(&part, text)?;
    fs::rename(part, folder.join(name))?;
    Ok(())
}

fn files(folder: &Path) -> Settings {
    Settings::new().set("endpoints.source", "files").set("endpoints.manifests", folder.display().to_string())
}

fn shows(id: &str, part: &str) -> String {
    format!("document.getElementById('{id}').innerText.includes({part:?})")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_shows_services_why_their_endpoints_are_chosen_and_broken_manifests() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let folder = node.scratch.dir("manifests")?;
    write(&folder, "shop.yaml", &manifests(300))?;
    let agent = node.agent(&files(&folder)).await?;
    let desk = opened(&node, DESK, &agent.url()).await?;
    desk.until("document.getElementById('endpoints-state').innerText === 'current'").await?;
    desk.until(&shows("endpoints-services", "300 Services")).await?;
    desk.until(&shows("endpoints-source-note", &folder.display().to_string())).await?;
    // Of all there are a bounded number is in the page.
    desk.until(&format!("{} === 200", count("[data-service]"))).await?;
    desk.until(&shows("services-count", "300 Services, the first 200 are shown")).await?;
    keep(&desk, "endpoints").await?;

    // One that is not among them is found.
    desk.eval(
        "((field) => { field.value = 'SHOP/web-0299'; field.dispatchEvent(new Event('input')); return true; })\
         (document.getElementById('services-filter'))",
    )
    .await?;
    desk.until(&format!("{} === 1", count("[data-service='shop/web-0299']"))).await?;
    desk.until(&shows("services-count", "1 of 300 Services found")).await?;
    desk.eval("document.querySelector('[data-service] .toggle').click() ?? true").await?;
    let explained = |part: &str| {
        format!("(document.querySelector('[data-service] .explanation')?.innerText ?? '').includes({part:?})")
    };
    desk.until(&explained("10.180.1.50:8080")).await?;
    desk.until(&explained("node (this node)")).await?;
    let chosen = |yes: bool| count(&format!("[data-service] .explained [data-chosen='{yes}']"));
    desk.until(&format!("{} === 1", chosen(true))).await?;
    ensure!(desk.eval(&chosen(false)).await? == 1, "the endpoint that is not ready is shown with its reason");
    keep(&desk, "endpoints-explained").await?;

    // What changes is seen without a reload.
    write(&folder, "shop.yaml", &manifests(300).replace("ready: false", "ready: true"))?;
    desk.until(&format!("{} === 2", chosen(true))).await?;

    // A broken manifest is named, with its last good version kept, and nothing of it is markup.
    write(&folder, "shop.yaml", "kind: Service\nmetadata: {name: web\n")?;
    write(&folder, "<img src=x onerror=window.pwned=1>.yaml", "kind: [\n")?;
    desk.until(&shows("faults", "shop.yaml")).await?;
    desk.until(&shows("faults", "onerror=window.pwned=1>.yaml")).await?;
    desk.until(&shows("faults-title", "2 faults in manifests")).await?;
    ensure!(
        desk.eval(&shows("endpoints-services", "300 Services")).await? == true,
        "the good version is gone"
    );
    ensure!(desk.eval("typeof window.pwned").await? == "undefined", "markup from a manifest's name ran");
    keep(&desk, "endpoints-broken").await?;

    let phone = opened(&node, PHONE, &format!("{}#service/shop/web-0007", agent.url())).await?;
    phone.until("document.querySelector(\"[data-service='shop/web-0007'] .explanation\") !== null").await?;
    let fits = "document.documentElement.scrollWidth <= window.innerWidth";
    ensure!(phone.eval(fits).await? == true, "the page is wider than the window");
    keep(&phone, "endpoints-phone").await?;
    for browser in [&desk, &phone] {
        let complaints = browser.complaints().await?;
        ensure!(complaints.is_empty(), "the browser complains: {complaints:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_says_how_to_turn_endpoints_on() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let agent = node.agent(&Settings::new().set("endpoints.source", "off")).await?;
    let browser = opened(&node, DESK, &agent.url()).await?;
    browser
        .until(&format!("/^Off: ./.test({})", "document.getElementById('endpoints-off-reason').innerText"))
        .await?;
    browser.until(&shows("endpoints-off", "source = \"files\"")).await?;
    ensure!(
        browser.eval("document.getElementById('endpoints').hidden").await? == true,
        "nothing else is shown"
    );
    Ok(())
}
