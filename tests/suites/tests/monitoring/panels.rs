//! A picture of the dashboard's panels.
//!
//! Owns: a page that draws them from Prometheus' HTTP API, since Grafana is no part of the suites. In: the dashboard, a
//! Prometheus with data. Out: a PNG.

use std::path::Path;

use anyhow::{Result, ensure};
use keelson_harness::scratch::Scratch;

use crate::browser::{Browser, Viewport};
use crate::files::Dashboard;
use crate::prometheus::Prometheus;

const LOOK: Viewport = Viewport { width: 1240, height: 1280, dark: false };

pub(crate) async fn picture(
    scratch: &Scratch,
    prometheus: &Prometheus,
    dashboard: &Dashboard,
    folder: &Path,
) -> Result<()> {
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
    let complaints = browser.complaints().await?;
    ensure!(complaints.is_empty(), "the browser complains: {complaints:?}");
    std::fs::create_dir_all(folder)?;
    std::fs::write(folder.join("dashboard.png"), browser.picture().await?)?;
    Ok(())
}
