//! Credentials are only where they are needed: not on disk, in no log, in no metric, in no debug output.

use crate::common::TestEnv;
use anyhow::{Context as _, Result, bail, ensure};
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::containerd::Kind;
use keelson_harness::cri::{Pull, failed};
use keelson_harness::images::{ImageSpec, TINY};
use keelson_harness::registry::ALICE;
use keelson_harness::scratch::Scratch;
use keelson_harness::util::{PATIENCE, eventually};
use keelson_harness::{on_both_runtimes, on_crio};
use keelson_proto::cri::AuthConfig;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

on_both_runtimes!(no_credential_appears_in_any_output);

on_crio!(no_credential_appears_in_any_output,);

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

fn base64(bytes: &[u8]) -> String {
    let mut text = String::new();
    for part in bytes.chunks(3) {
        let bits =
            part.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - part.len()));
        for n in 0..=part.len() {
            text.push(char::from(ALPHABET[(bits >> (18 - 6 * n) & 63) as usize]));
        }
        text.extend(std::iter::repeat_n('=', 3 - part.len()));
    }
    text
}

/// The encodings of a text: as it is, in hexadecimal, and in base64 with anything before and after it.
fn forms(secret: &str) -> Vec<Vec<u8>> {
    let hex: String = secret.bytes().map(|byte| format!("{byte:02x}")).collect();
    let mut forms = vec![secret.as_bytes().to_vec(), hex.to_uppercase().into_bytes(), hex.into_bytes()];
    let reversed: String = secret.chars().rev().collect();
    forms.push(reversed.into_bytes());
    for before in 0..3 {
        let bytes = [vec![b' '; before], secret.as_bytes().to_vec()].concat();
        let text = base64(&bytes[..bytes.len() / 3 * 3]);
        // Characters that share a group with the bytes before it may differ.
        let own = if before == 0 { &text[..] } else { &text[4..] };
        forms.push(own.as_bytes().to_vec());
        forms.push(own.replace('+', "-").replace('/', "_").into_bytes());
    }
    forms
}

fn contains(hay: &[u8], needle: &[u8]) -> bool {
    memchr::memmem::find(hay, needle).is_some()
}

/// The places that contain one of the secrets in any encoding.
fn leaks(places: &BTreeMap<String, Vec<u8>>, secrets: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for secret in secrets {
        for form in forms(secret) {
            let form_text = String::from_utf8_lossy(&form).into_owned();
            let holding = places.iter().filter(|(_, content)| contains(content, &form));
            found.extend(holding.map(|(place, _)| format!("{secret:?} as {form_text:?} in {place}")));
        }
    }
    found
}

#[test]
fn the_secret_search_finds_every_encoding() {
    let secret = "keelson-secret-4711";
    let hex: String = secret.bytes().map(|byte| format!("{byte:02x}")).collect();
    let texts = [
        format!("level=trace password={secret} end"),
        format!("x{hex}y"),
        format!("Authorization: Basic {}", base64(format!("alice:{secret}").as_bytes())),
        format!("Basic {}", base64(format!("al:{secret}:x").as_bytes())),
        format!("Basic {}", base64(format!("robot1:{secret}").as_bytes())),
        format!("Basic {}", base64(secret.as_bytes())),
    ];
    for text in texts {
        let places = BTreeMap::from([("here".to_owned(), text.clone().into_bytes())]);
        assert!(!leaks(&places, &[secret]).is_empty(), "not found in {text}");
        assert!(leaks(&places, &["keelson-other-4711"]).is_empty());
    }
    assert_eq!(base64(b"alice:keelson-alice-password"), ALICE.basic.trim_start_matches("Basic "));
}

/// Credentials of every kind that a request can carry; all but the first are refused.
fn credentials() -> (Vec<AuthConfig>, Vec<&'static str>) {
    let of = |username: &str, password: &str| AuthConfig {
        username: username.to_owned(),
        password: password.to_owned(),
        ..AuthConfig::default()
    };
    let kinds = vec![
        of(ALICE.name, ALICE.password),
        of("robot-user-6e1c", "wrong-password-93af"),
        AuthConfig { identity_token: "identity-token-b2d8f1".to_owned(), ..AuthConfig::default() },
        AuthConfig { registry_token: "registry-token-77c0e9".to_owned(), ..AuthConfig::default() },
        AuthConfig { auth: base64(b"auth-user-0d3b:auth-password-5e6a"), ..AuthConfig::default() },
        // No base64 at all: runtimes like to quote what they cannot read.
        AuthConfig { auth: "!!not-base64-1f2e3d!!".to_owned(), ..AuthConfig::default() },
    ];
    let secrets = vec![
        ALICE.password,
        "robot-user-6e1c",
        "wrong-password-93af",
        "identity-token-b2d8f1",
        "registry-token-77c0e9",
        "auth-user-0d3b",
        "auth-password-5e6a",
        "not-base64-1f2e3d",
    ];
    (kinds, secrets)
}

/// Other contents of a folder of manifests: a last-applied annotation, which may hold anything; a Secret; and one in a
/// file that is no YAML, whose syntax error is reported.
const MANIFESTS: [(&str, &str); 3] = [
    (
        "web.yaml",
        r#"
apiVersion: v1
kind: Service
metadata:
  name: web
  annotations:
    kubectl.kubernetes.io/last-applied-configuration: '{"token": "annotation-secret-8d41"}'
spec: {clusterIP: 10.96.0.80, clusterIPs: [10.96.0.80], ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints: [{addresses: [10.0.0.80], conditions: {ready: true}}]
ports: [{name: "", port: 8080}]
"#,
    ),
    (
        "secret.yaml",
        r"
apiVersion: v1
kind: Secret
metadata: {name: registry}
stringData: {password: manifest-secret-52c7}
",
    ),
    (
        "broken.yaml",
        r#"
apiVersion: v1
kind: Secret
metadata: {name: broken}
stringData: {password: "broken-secret-e0b9", token: "#,
    ),
];

const IN_MANIFESTS: [&str; 3] = ["annotation-secret-8d41", "manifest-secret-52c7", "broken-secret-e0b9"];

async fn no_credential_appears_in_any_output(kind: Kind) -> Result<()> {
    let manifests = Scratch::new()?;
    for (name, text) in MANIFESTS {
        fs::write(manifests.path().join(name), text).with_context(|| format!("cannot write {name}"))?;
    }
    let settings = Settings::limit(1)
        .set("agent.log", "trace")
        .set("pulls.cancel_grace", "0s")
        .set("endpoints.source", "files")
        .set("endpoints.manifests", manifests.path().display().to_string());
    let mut env = TestEnv::with_users(kind, &settings).await?;
    let specs: Vec<_> =
        ["secret-done", "secret-held", "secret-waits"].map(|name| ImageSpec::single(name, TINY)).into();
    let images = env.node.push(&specs).await?;
    let (kinds, mut secrets) = credentials();
    secrets.extend(IN_MANIFESTS);
    for auth in &kinds[1..] {
        failed(pull(&env, &env.pull_of(&images[0]), auth).await, "its credentials are not good")?;
    }
    pull(&env, &env.pull_of(&images[0]), &kinds[0]).await?;
    // One that runs, one that waits, and one that waits with invalid credentials.
    let _hold = env.hold(&images[1]);
    let running = env.begin_with(env.pull_of(&images[1]).user(&ALICE));
    env.wait_for_active(&images[1..2]).await?;
    let waiting = env.begin_with(env.pull_of(&images[2]).user(&ALICE).pod("web", "uid-1"));
    let wrong = env.begin_with(env.pull_of(&images[2]).credentials("robot-user-6e1c", "wrong-password-93af"));
    env.wait_for_callers(3).await?;

    let mut places = written(&env.agent)?;
    places.extend(shown(&env.agent).await?);
    for (place, part) in [
        ("/debug/pulls", "secret-held"),
        ("/debug/events", "secret-held"),
        ("/debug/actors", "PullCoordinator"),
        ("/debug/endpoints", "broken.yaml"),
        ("/debug/endpoints/default/web", "10.0.0.80"),
        ("keelson endpoints", "broken.yaml"),
        ("keelson endpoints explain default/web", "10.0.0.80"),
        ("keelson watch --once -o json", "10.0.0.80"),
    ] {
        let content = places.get(place).with_context(|| format!("{place} was not searched"))?;
        ensure!(contains(content, part.as_bytes()), "{place} does not contain {part}");
    }
    for going in [running, waiting, wrong] {
        going.abort();
    }
    env.agent.terminate().await?;
    places.extend(
        written(&env.agent)?.into_iter().map(|(place, content)| (format!("{place} (at the end)"), content)),
    );

    // The names of images are written: where the search does not find them, it would not find secrets either.
    let holding = |part: &str| -> Vec<String> {
        let all = places.iter().filter(|(_, content)| contains(content, part.as_bytes()));
        all.map(|(place, _)| place.clone()).collect()
    };
    let answer = holding("secret-held");
    ensure!(
        answer.iter().any(|place| place.contains("state/")),
        "the state does not contain pulls, only {answer:?}"
    );
    ensure!(
        holding("TRACE").iter().any(|place| place.contains("keelson.log")),
        "the log is not at level trace"
    );
    ensure!(
        answer.iter().any(|place| place.contains("keelson.log")),
        "the log does not contain pulls, only {answer:?}"
    );
    let found = leaks(&places, &secrets);
    ensure!(found.is_empty(), "found:\n{}", found.join("\n"));
    Ok(())
}

async fn pull(env: &TestEnv, pull: &Pull, auth: &AuthConfig) -> Result<String, tonic::Status> {
    let mut request = pull.request();
    request.get_mut().auth = Some(auth.clone());
    Ok(env.cri.images().pull_image(request).await?.into_inner().image_ref)
}

/// All files of the agent: its folder with state and log.
fn written(agent: &Agent) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut places = BTreeMap::new();
    let folder = agent.config();
    let folder = folder.parent().context("the settings are in a folder")?;
    collect(folder, folder, &mut places)?;
    ensure!(places.keys().any(|place| place.starts_with("state/")), "no state in {}", folder.display());
    Ok(places)
}

fn collect(top: &Path, folder: &Path, places: &mut BTreeMap<String, Vec<u8>>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        let place = path.strip_prefix(top).unwrap_or(&path).display().to_string();
        if path.is_dir() {
            collect(top, &path, places)?;
        } else if path.is_file() {
            // The state's files are created and deleted while the agent runs.
            if let Ok(content) = fs::read(&path) {
                places.insert(place, content);
            }
        }
    }
    Ok(())
}

/// All output of the agent and its commands.
async fn shown(agent: &Agent) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut places = BTreeMap::new();
    eventually(PATIENCE, "the endpoints are those of the folder", || async {
        let shown = agent.json("/debug/endpoints").await?;
        ensure!(shown["state"] == "synced" && shown["services"] == 1, "they are {shown}");
        ensure!(
            shown["faults"].as_array().is_some_and(|faults| faults.len() == 1),
            "nothing is wrong: {shown}"
        );
        Ok(())
    })
    .await?;
    let mut paths = vec!["/", "/metrics", "/version", "/livez", "/readyz"]
        .into_iter()
        .map(str::to_owned)
        .collect::<Vec<_>>();
    let parts = ["actors", "pulls", "node", "storage", "config", "endpoints", "endpoints/default/web"];
    paths.extend(parts.map(|name| format!("/debug/{name}")));
    let actors = agent.json("/debug/actors").await?;
    let names = actors["actors"].as_array().into_iter().flatten().filter_map(|actor| actor["name"].as_str());
    paths.extend(names.map(|name| format!("/debug/actors/{name}")));
    ensure!(paths.len() >= 13, "the agent shows no actors: {actors}");
    for path in paths {
        places.insert(path.clone(), agent.http_get(&path).await?.success()?.body.to_vec());
    }
    places.insert("/debug/events".to_owned(), first_events(agent).await?);

    let commands: [&[&str]; 13] = [
        &["pulls"],
        &["pulls", "-o", "json"],
        &["actors", "PullCoordinator"],
        &["state"],
        &["limit"],
        &["config", "show"],
        &["endpoints"],
        &["endpoints", "-o", "json"],
        &["endpoints", "explain", "default/web"],
        &["endpoints", "explain", "default/web", "-o", "json"],
        &["endpoints", "watchers"],
        &["watch", "--once", "default/web"],
        &["watch", "--once", "-o", "json"],
    ];
    for command in commands {
        let output = agent.keelson_by_config(command).await?.success()?;
        places.insert(format!("keelson {}", command.join(" ")), (output.out + &output.err).into_bytes());
    }
    Ok(places)
}

/// The beginning of the stream of events, with at least one event about pulls.
async fn first_events(agent: &Agent) -> Result<Vec<u8>> {
    let url = agent.url();
    let mut stream = TcpStream::connect(url.trim_start_matches("http://")).await.context("no HTTP side")?;
    stream.write_all(b"GET /debug/events HTTP/1.1\r\nHost: localhost\r\n\r\n").await?;
    let mut seen = Vec::new();
    let reading = async {
        while !contains(&seen, b"secret-held") {
            if stream.read_buf(&mut seen).await? == 0 {
                bail!("the stream of events ended: {}", String::from_utf8_lossy(&seen));
            }
        }
        Ok(())
    };
    match tokio::time::timeout(Duration::from_secs(60), reading).await {
        Ok(read) => read.map(|()| seen),
        Err(_) => bail!("no event about pulls came"),
    }
}
