//! A headless Chromium, driven through WebDriver.
//!
//! Owns: the processes of browser and driver, and one session. In: an address. Out: contents and screenshots of the
//! page. Speaks the commands of the protocol that it needs directly: JSON over HTTP on loopback. Pictures and
//! viewports are Chromium's own commands: WebDriver's pictures are of the viewport only, and its windows not as narrow as a phone.

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use http::Method;
use keelson_harness::{
    peers,
    process::{Process, Program},
    scratch::Scratch,
    util::{PATIENCE, eventually, free_port, http},
};
use serde_json::{Value, json};

/// Size of the viewport in CSS pixels, and the preferred colour scheme. One that is higher than wide is a phone's.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Viewport {
    pub(crate) width: u32,
    pub(crate) height: u32,
    /// `prefers-color-scheme: dark`.
    pub(crate) dark: bool,
}

#[derive(Debug)]
pub(crate) struct Browser {
    session: String,
    _driver: Process,
}

impl Browser {
    /// Starts driver and browser with a new profile, which takes seconds of processor time.
    pub(crate) async fn start(scratch: &Scratch, look: Viewport) -> Result<Self> {
        let port = free_port()?;
        let folder = scratch.dir(&format!("browser-{port}"))?;
        let driver = Program {
            name: "chromedriver".to_owned(),
            path: peers::system("chromedriver", "chromium-driver")?,
            args: vec![format!("--port={port}")],
            env: ["HOME", "TMPDIR"].map(|name| (name.to_owned(), folder.display().to_string())).into(),
            log: folder.join("chromedriver.log"),
        }
        .start()?;
        let base = format!("http://127.0.0.1:{port}");
        eventually(PATIENCE, "chromedriver is ready", || {
            let url = format!("{base}/status");
            async move { http(Method::GET, &url, &[], Bytes::new()).await?.success().map(drop) }
        })
        .await?;
        let made = call(Method::POST, &format!("{base}/session"), &capabilities(&folder)).await?;
        let id = made["sessionId"].as_str().context("chromedriver made no session")?;
        let browser = Self { session: format!("{base}/session/{id}"), _driver: driver };
        browser.look(look).await?;
        Ok(browser)
    }

    /// Also of the page that is open.
    pub(crate) async fn look(&self, Viewport { width, height, dark }: Viewport) -> Result<()> {
        let phone = width < height;
        let ratio = if phone { 2 } else { 1 };
        let metrics =
            json!({ "width": width, "height": height, "deviceScaleFactor": ratio, "mobile": phone });
        self.command("Emulation.setDeviceMetricsOverride", &metrics).await?;
        self.command("Emulation.setTouchEmulationEnabled", &json!({ "enabled": phone })).await?;
        let scheme = if dark { "dark" } else { "light" };
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.command("Emulation.setEmulatedMedia", &json!({ "features": features })).await.map(drop)
    }

    /// Loads the page, also if only the fragment is another one.
    pub(crate) async fn open(&self, url: &str) -> Result<()> {
        for url in ["about:blank", url] {
            call(Method::POST, &format!("{}/url", self.session), &json!({ "url": url })).await?;
        }
        Ok(())
    }

    pub(crate) async fn eval(&self, expression: &str) -> Result<Value> {
        let body = json!({ "script": format!("return ({expression});"), "args": [] });
        call(Method::POST, &format!("{}/execute/sync", self.session), &body).await
    }

    pub(crate) async fn until(&self, expression: &str) -> Result<()> {
        eventually(PATIENCE, expression, || async move {
            match self.eval(expression).await? {
                Value::Bool(true) => Ok(()),
                other => bail!("it is {other}"),
            }
        })
        .await
    }

    /// Console messages since the page was opened.
    pub(crate) async fn complaints(&self) -> Result<Vec<String>> {
        let log =
            call(Method::POST, &format!("{}/se/log", self.session), &json!({ "type": "browser" })).await?;
        let entries = log.as_array().cloned().unwrap_or_default();
        Ok(entries.iter().map(|entry| entry["message"].as_str().unwrap_or_default().to_owned()).collect())
    }

    /// A PNG of the viewport, or of the whole page.
    pub(crate) async fn picture(&self, beyond_viewport: bool) -> Result<Vec<u8>> {
        let params = json!({ "format": "png", "captureBeyondViewport": beyond_viewport });
        let answer = self.command("Page.captureScreenshot", &params).await?;
        decode_base64(answer["data"].as_str().context("no picture")?)
    }

    /// Chromium's own, of its DevTools protocol.
    async fn command(&self, name: &str, params: &Value) -> Result<Value> {
        let body = json!({ "cmd": name, "params": params });
        call(Method::POST, &format!("{}/goog/cdp/execute", self.session), &body).await
    }
}

fn capabilities(folder: &Path) -> Value {
    let profile = format!("--user-data-dir={}", folder.join("profile").display());
    let args = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        &profile,
    ];
    json!({ "capabilities": { "alwaysMatch": {
        "browserName": "chrome",
        "goog:loggingPrefs": { "browser": "ALL" },
        "goog:chromeOptions": { "args": args },
    } } })
}

async fn call(method: Method, url: &str, body: &Value) -> Result<Value> {
    let body = if method == Method::GET { Bytes::new() } else { Bytes::from(body.to_string()) };
    let answer = http(method, url, &[("content-type", "application/json")], body).await?;
    let text = answer.text();
    let mut value: Value = serde_json::from_str(&text).with_context(|| format!("{url} answered {text}"))?;
    if let Some(error) = value["value"]["error"].as_str() {
        bail!("{url}: {error}: {}", value["value"]["message"]);
    }
    Ok(value["value"].take())
}

/// Standard base64, in which the browser sends screenshots.
fn decode_base64(text: &str) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut word, mut bits) = (0_u32, 0_u32);
    for character in text.bytes().filter(|byte| *byte != b'=') {
        let six = match character {
            b'A'..=b'Z' => character - b'A',
            b'a'..=b'z' => character - b'a' + 26,
            b'0'..=b'9' => character - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            other => bail!("byte {other} is no base64"),
        };
        word = (word << 6) | u32::from(six);
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push(u8::try_from((word >> bits) & 0xff)?);
        }
    }
    Ok(bytes)
}
