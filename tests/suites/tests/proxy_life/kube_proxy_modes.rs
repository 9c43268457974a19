//! From a kube-proxy in mode iptables, of both variants of iptables, to each backend: clients notice nothing, and nothing
//! of it is left.

use crate::backends::{services, takes_over};
use crate::common::{TestEnv, eventually_slow};
use crate::kube_proxy::{ControlPlane, answered, make};
use crate::model::{NODE_NAME, Service};
use crate::traffic::Traffic;
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::kube::{KubeProxy, KubeProxyOptions};
use keelson_cluster::net::{Family, Namespace, Transport};
use keelson_harness::peers;
use serde_json::json;
use std::env;
use std::os::unix::fs::symlink;

const BACKENDS: [&str; 3] = ["nft", "iptables", "userspace"];

/// A variant of iptables.
struct Variant {
    name: &'static str,
}

impl Variant {
    /// kube-proxy runs `iptables`: a PATH on which that is this variant.
    fn path(&self, env: &TestEnv) -> Result<String> {
        let folder = env.scratch.dir("variant")?;
        for program in ["iptables", "ip6tables"] {
            for what in ["", "-save", "-restore"] {
                let of_variant = peers::system(&format!("{program}-{}{what}", self.name), "iptables")?;
                symlink(of_variant, folder.join(format!("{program}{what}")))?;
            }
        }
        Ok(format!("{}:{}", folder.display(), env::var("PATH").context("no PATH")?))
    }

    /// The rules of both families.
    fn saved(&self, node: &Namespace) -> Result<String> {
        let mut all = String::new();
        for program in ["iptables", "ip6tables"] {
            let save = peers::system(&format!("{program}-{}-save", self.name), "iptables")?;
            all += &node.command(&save, &[])?;
        }
        Ok(all)
    }
}

/// What the clients do. The backend in user space accepts no connection before it has taken over.
async fn traffic(env: &TestEnv, services: &[Service], backend: &str) -> Result<Traffic> {
    let traffic = if backend == "userspace" {
        let mut flows = Traffic::none(&env.world)?;
        for service in services {
            let (client, valid) = (env.world.pod().clone(), service.endpoints.clone());
            flows.open_flow(client, service.at(), Transport::Tcp, valid);
        }
        flows
    } else {
        Traffic::start(&env.world, services)?
    };
    traffic.wait_for_answers().await?;
    Ok(traffic)
}

async fn every_backend_takes_over(variant: Variant) -> Result<()> {
    let mut env = TestEnv::new()?;
    let plane = ControlPlane::start(&env).await?;
    let services = services();
    make(&plane.writer, &services).await?;
    plane.start_agent(&mut env).await?;
    let mut options = KubeProxyOptions::new(NODE_NAME).with(json!({"mode": "iptables"}));
    options.env.push(("PATH".to_owned(), variant.path(&env)?));
    let mut kube_proxy = KubeProxy::start(&env.scratch, &plane.cluster, env.node(), &options).await?;
    for backend in BACKENDS {
        let what = || format!("from iptables ({}) to {backend}", variant.name);
        has_rules(&env, &variant).await?;
        answered(&env, &services).await.with_context(what)?;
        let traffic = traffic(&env, &services, backend).await?;
        kube_proxy.kill9()?;
        let of_backend =
            env.options.clone().set("proxy.backend", backend).set("proxy.iptables_variant", variant.name);
        env.proxy.configure(&of_backend)?;
        env.proxy.start_again(env.world.node()).await?;
        takes_over(&env, backend, "kube-proxy").await.with_context(what)?;
        let saved = variant.saved(env.node())?;
        ensure!(!saved.contains("KUBE-S"), "{}: {saved}", what());
        traffic.finish().await.with_context(what)?;
        answered(&env, &services).await.with_context(what)?;
        // Back, for the next one.
        ensure!(env.proxy.terminate().await?.success());
        env.cleanup(&[]).await?;
        kube_proxy.start_again(env.world.node()).await?;
    }
    has_rules(&env, &variant).await?;
    kube_proxy.kill9()
}

async fn has_rules(env: &TestEnv, variant: &Variant) -> Result<()> {
    eventually_slow("kube-proxy has made its rules, and there are no others", || async {
        let saved = variant.saved(env.node())?;
        let count = saved.lines().filter(|line| line.starts_with(":KUBE-SVC-")).count();
        ensure!(count >= Family::ALL.len() && !saved.contains("KEELSON-"), "{saved}");
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn every_backend_takes_over_from_mode_iptables_with_iptables_nft() -> Result<()> {
    every_backend_takes_over(Variant { name: "nft" }).await
}

#[tokio::test(flavor = "multi_thread")]
async fn every_backend_takes_over_from_mode_iptables_with_iptables_legacy() -> Result<()> {
    every_backend_takes_over(Variant { name: "legacy" }).await
}
