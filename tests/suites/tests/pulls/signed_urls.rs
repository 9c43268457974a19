//! Errors of anonymous pulls that contain pre-signed URLs (I15).

use crate::common::TestEnv;
use anyhow::{Result, ensure};
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::cri::failed;
use keelson_harness::images::TINY;
use keelson_harness::on_both_runtimes;
use keelson_harness::registry_proxy::{Fault, Match, SIGNATURE};

on_both_runtimes!(a_signed_url_reaches_no_output);

/// I15: the registry redirects to storage with a URL that is a credential, the storage fails, and the runtime's error
/// quotes the URL. The caller gets the runtime's error; log, page, JSON and commands show it without the signature.
async fn a_signed_url_reaches_no_output(kind: Kind) -> Result<()> {
    let env = TestEnv::start(kind, &Settings::limit(1).set("agent.log", "trace")).await?;
    let images = env.node.push_many("signed", 1, TINY).await?;
    env.node.proxy.rule(Match::layers(), Fault::SignedRedirect);
    let name = env.node.name(&images[0]);
    let status = failed(env.cri.pull_image(&name).await, "the storage refuses connections")?;

    let mut places = vec![("keelson.log".to_owned(), env.agent.log()?)];
    for path in ["/debug/pulls", "/debug/actors/PullCoordinator", "/debug/actors/RuntimeClient", "/metrics"] {
        let body = env.agent.http_get(path).await?.success()?.body;
        places.push((path.to_owned(), String::from_utf8_lossy(&body).into_owned()));
    }
    for command in [&["pulls"][..], &["pulls", "-o", "json"], &["actors", "PullCoordinator"]] {
        let output = env.agent.keelson_by_config(command).await?;
        places.push((format!("keelson {}", command.join(" ")), output.out));
    }
    let leaks: Vec<&str> =
        places.iter().filter(|(_, text)| text.contains(SIGNATURE)).map(|(place, _)| place.as_str()).collect();
    ensure!(leaks.is_empty(), "the signature is in {leaks:?}; the runtime returned: {status}");
    // The rest of the error is kept: otherwise the search above would prove nothing.
    let shown = &places[1].1;
    ensure!(shown.contains("127.0.0.1:1/store/layer"), "the error is not in {shown}");
    Ok(())
}
