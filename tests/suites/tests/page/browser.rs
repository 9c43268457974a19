//! A headless Chromium, driven through WebDriver.
//!
//! Owns: the processes of browser and driver, and one session. In: an address. Out: contents and screenshots of the
//! page. Speaks the commands of the protocol that it needs directly: JSON over HTTP on loopback. Pictures are Chromium's own
//! command, because WebDriver's are of the viewport only.

use std::path::{Path, PathBuf};

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

/// A browser's window cannot be narrower than this; a phone's screen is emulated.
const SMALLEST_WINDOW: u32 = 500;

/// Size of the viewport in CSS pixels, and the preferred colour scheme.
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
    /// Starts driver and browser with a new profile.
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
        let made = call(Method::POST, &format!("{base}/session"), &capabilities(&folder, look)).await?;
        let id = made["sessionId"].as_str().context("chromedriver made no session")?;
        Ok(Self { session: format!("{base}/session/{id}"), _driver: driver })
    }

    pub(crate) async fn open(&self, url: &str) -> Result<()> {
        call(Method::POST, &format!("{}/url", self.session), &json!({ "url": url })).await.map(drop)
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
        let body = json!({ "cmd": "Page.captureScreenshot", "params": params });
        let answer = call(Method::POST, &format!("{}/goog/cdp/execute", self.session), &body).await?;
        decode_base64(answer["data"].as_str().context("no picture")?)
    }
}

fn capabilities(folder: &Path, look: Viewport) -> Value {
    let profile: PathBuf = folder.join("profile");
    let mut args = vec![
        "--headless".to_owned(),
        "--no-sandbox".to_owned(),
        "--disable-gpu".to_owned(),
        "--disable-background-networking".to_owned(),
        "--disable-component-update".to_owned(),
        "--disable-sync".to_owned(),
        "--no-first-run".to_owned(),
        format!("--user-data-dir={}", profile.display()),
        format!("--window-size={},{}", look.width, look.height),
    ];
    if look.dark {
        args.push("--blink-settings=preferredColorScheme=0".to_owned());
    }
    let mut options = json!({ "args": args });
    if look.width < SMALLEST_WINDOW {
        let metrics = json!({ "width": look.width, "height": look.height, "pixelRatio": 2.0, "touch": true });
        options["mobileEmulation"] = json!({ "deviceMetrics": metrics });
    }
    json!({ "capabilities": { "alwaysMatch": {
        "browserName": "chrome",
        "goog:loggingPrefs": { "browser": "ALL" },
        "goog:chromeOptions": options,
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
