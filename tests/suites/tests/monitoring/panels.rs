//! A picture of the dashboard's panels.
//!
//! Owns: a page that draws them from Prometheus' HTTP API, since Grafana is no part of the suites. In: the dashboard, a
//! Prometheus with data. Out: a PNG of all of them.

use anyhow::{Result, ensure};
use keelson_harness::scratch::Scratch;

use crate::browser::{Browser, Viewport};
use crate::files::Dashboard;
use crate::prometheus::Prometheus;

const LOOK: Viewport = Viewport { width: 1440, height: 1280, dark: false };
/// A JavaScript expression: titles and names of series that do not fit, of all panels.
const CUT_OFF: &str = "[...document.querySelectorAll('.panel, .panel h2, .value, .legend')]\
                       .filter((e) => e.scrollWidth > e.clientWidth || e.scrollHeight > e.clientHeight)\
                       .map((e) => e.innerText)";

/// Fails if the page is empty, or if something on it is cut off.
pub(crate) async fn picture(
    scratch: &Scratch,
    prometheus: &Prometheus,
    dashboard: &Dashboard,
) -> Result<Vec<u8>> {
    let data = format!(
        "<script>const PROMETHEUS = {:?}; const DASHBOARD = {};</script>",
        prometheus.url(),
        // The only markup that could end the script.
        dashboard.0.to_string().replace("</", "<\\/")
    );
    let page = scratch.dir("panels")?.join("panels.html");
    std::fs::write(&page, include_str!("panels.html").replace("<!-- DATA -->", &data))?;
    let browser = Browser::start(scratch, LOOK).await?;
    browser.open(&format!("file://{}", page.display())).await?;
    browser.until("document.body.dataset.state === 'drawn'").await?;
    ensure!(browser.eval("document.querySelectorAll('path').length > 20").await? == true, "it is empty");
    let fits = "document.documentElement.scrollWidth <= window.innerWidth";
    ensure!(browser.eval(fits).await? == true, "the page is wider than the window");
    let cut_off = browser.eval(CUT_OFF).await?;
    ensure!(cut_off.as_array().is_some_and(Vec::is_empty), "cut off: {cut_off}");
    let complaints = browser.complaints().await?;
    ensure!(complaints.is_empty(), "the browser complains: {complaints:?}");
    let height = browser.eval("document.documentElement.scrollHeight").await?;
    let picture = browser.picture(true).await?;
    ensure!(
        height.as_u64() == height_of(&picture),
        "the page is {height} high, the picture {:?}",
        height_of(&picture)
    );
    Ok(picture)
}

/// Of a PNG: its header has width and height.
fn height_of(picture: &[u8]) -> Option<u64> {
    let bytes: [u8; 4] = picture.get(20..24)?.try_into().ok()?;
    Some(u32::from_be_bytes(bytes).into())
}
