//! P20: kube-proxy's configuration file instead of the settings.

use crate::common::{TestEnv, ensure_contains, run_inside};
use crate::model::{Service, pool};
use anyhow::{Result, ensure};
use keelson_cluster::net::Family;
use keelson_harness::peers;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};

const CONFIGURATION: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: iptables
clusterCIDR: 10.244.0.0/16
bindAddressHardFail: true
healthzBindAddress: 127.0.0.1
iptables:
  masqueradeBit: 5
  localhostNodePorts: true
strictArp: true
";

#[tokio::test(flavor = "multi_thread")]
async fn p20_a_proxy_takes_the_configuration_of_kube_proxy() -> Result<()> {
    let services = [Service::new(10, Family::V4, &pool(Family::V4, 8080)[..2])];
    let mut env = TestEnv::new()?;
    services[0].write(&env.manifests)?;
    env.agent.start_live().await?;
    let file = env.scratch.path().join("config.conf");
    fs::write(&file, CONFIGURATION)?;
    let (file, target) = (file.display().to_string(), env.agent.endpoints_target());
    let keelson = peers::keelson()?;
    let run = |more: &'static [&'static str]| {
        let mut args = vec!["proxy", "--config", &file, "--target", &target];
        args.extend(more);
        let (node, keelson) = (env.node(), keelson.clone());
        async move { run_inside(node, &keelson, &args).await }
    };

    // The backend iptables, masquerading with bit 5, node ports at every address; unknown fields are reported.
    let output = run(&["--print"]).await?.success()?;
    ensure_contains(
        &output.out,
        &["# iptables-restore", "--set-xmark 0x20/0x20", "10.244.0.0/16", "--dst-type LOCAL"],
    )?;
    ensure_contains(&output.err, &["unknown field \"strictArp\""])?;
    ensure!(!output.err.contains("has no effect"), "{}", output.err);

    // An address in use is fatal, because of bindAddressHardFail.
    let taken = SocketAddr::from((Ipv4Addr::LOCALHOST, 10249));
    let _other = env.node().tcp_listener(taken)?;
    let socket = format!("proxy.listen=unix://{}", env.scratch.path().join("debug.sock").display());
    let args = ["proxy", "--config", &file, "--target", &target, "--set", &socket, "--set", "proxy.http="];
    let output = run_inside(env.node(), &keelson, &args).await?;
    ensure!(output.code == Some(1), "{output:?}");
    let message = format!("{}{}", output.out, output.err);
    ensure_contains(
        &message,
        &["cannot listen on 127.0.0.1:10249", "proxy.metrics_bind_address", "bind_address_hard_fail"],
    )?;
    ensure_contains(&message, &["field of the KubeProxyConfiguration has no effect"])
}
