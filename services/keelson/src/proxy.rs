//! The service proxy: runs a backend, prints what it would program, or removes rules.
//!
//! Owns: the list of backends, the evaluation of the settings, and the order of start and stop. In: settings and signals. Out:
//! rules in the kernel, which stay when it ends; exit codes as of every command.

use std::{net::SocketAddr, process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context as _;
use keelson_client::{Client, Options as Follow, Target};
use keelson_config::{Format, Loaded, ProxyBackend, Settings};
use keelson_proxy::{
    backend::{Access, Driver, RuleOwner},
    leftovers::{self, Places, Removal},
    preview::Preview,
    run::{Backends, RunConfig, run as run_proxy},
};
use keelson_serve::unix::Bound;
use tokio::{
    net::TcpListener,
    runtime::Runtime,
    signal::unix::{SignalKind, signal},
};
use tokio_util::sync::CancellationToken;

use self::{
    choice::Selected,
    options::{options, settings_summary},
};
use crate::{
    agent::{logs, panics, raise_descriptors, systemd},
    memory,
    output::{print, print_error},
};

mod choice;
mod options;

pub(crate) use choice::probe_backends;
pub(crate) use options::conntrack as conntrack_options;

/// All backends, in the order in which `auto` tries them, and whether it does. Their rules are removed in this order, too:
/// virtual servers before the chains that they need.
const DRIVERS: &[(ProxyBackend, &dyn Driver, bool)] = &[
    #[cfg(feature = "ebpf")]
    (ProxyBackend::Ebpf, &keelson_proxy_ebpf::Ebpf, true),
    (ProxyBackend::Nft, &keelson_proxy_nft::Nft, true),
    (ProxyBackend::Ipvs, &keelson_proxy_ipvs::Ipvs, false),
    (ProxyBackend::Iptables, &keelson_proxy_iptables::Iptables, true),
    (ProxyBackend::Userspace, &keelson_proxy_userspace::Userspace, true),
];

/// How long another process may listen at `proxy.listen`: as long as it may keep a claim.
const PATIENCE: Duration = Duration::from_secs(10);

/// `None`: `auto`.
fn driver(backend: ProxyBackend) -> Option<&'static dyn Driver> {
    DRIVERS.iter().find(|(value, ..)| *value == backend).map(|(_, driver, _)| *driver)
}

/// Values of `proxy.backend`, without `auto`.
pub(crate) fn backend_names() -> impl Iterator<Item = &'static str> {
    DRIVERS.iter().map(|(_, driver, _)| driver.info().name)
}

/// Runs the backend of the settings until a signal ends it.
pub(crate) fn run(loaded: Loaded, runtime: &Runtime) -> anyhow::Result<ExitCode> {
    logs::start(&loaded.settings.agent)?;
    for note in loaded.kube_proxy.iter().flatten() {
        tracing::warn!(note, "field of the KubeProxyConfiguration has no effect");
    }
    raise_descriptors();
    panics::end_the_process();
    let settings = keelson_config::render_show(&loaded, Format::Json);
    runtime.block_on(program(loaded.settings, &settings))
}

/// Removes rules. `backend`: only those of this one.
pub(crate) fn clean_up(kube_proxy: bool, backend: Option<&str>) -> anyhow::Result<ExitCode> {
    let names: Vec<&str> = backend_names().collect();
    if let Some(unknown) = backend.filter(|backend| !names.contains(backend)) {
        let names = names.join(", ");
        print_error(&format!("keelson: no backend {unknown:?}; write one of {names}"));
        return Ok(ExitCode::from(2));
    }
    let owner = if kube_proxy { RuleOwner::KubeProxy } else { RuleOwner::Keelson };
    // Chains of iptables first: some are in tables of nftables, and only iptables changes them.
    let mut removal = if kube_proxy { leftovers::remove(&Places::default()) } else { Removal::default() };
    let chosen = DRIVERS
        .iter()
        .map(|(_, driver, _)| *driver)
        .filter(|driver| backend.is_none_or(|backend| driver.info().name == backend));
    remove_rules(chosen, owner, &mut removal);
    for what in &removal.removed {
        print(&format!("removed {what}"))?;
    }
    if removal.removed.is_empty() && removal.failed.is_empty() {
        print("nothing to remove")?;
    }
    for note in &removal.notes {
        print_error(&format!("keelson: {note}"));
    }
    for what in &removal.failed {
        print_error(&format!("keelson: cannot remove {what}"));
    }
    Ok(if removal.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A backend that fails does not keep the rules of the others.
fn remove_rules<'a>(drivers: impl Iterator<Item = &'a dyn Driver>, owner: RuleOwner, removal: &mut Removal) {
    for driver in drivers {
        let removed = &mut removal.removed;
        if let Err(error) = driver.remove_rules(owner, &mut |object| removed.push(object)) {
            removal.failed.push(format!("the rules of the backend {}: {error}", driver.info().name));
        }
    }
}

/// Computes the changes for the latest state, or the whole ruleset `as_text`, and prints them.
pub(crate) async fn preview(settings: &Settings, as_text: bool) -> anyhow::Result<ExitCode> {
    let target = target(settings)?;
    print_error(&format!("keelson: reading the full state from {target}"));
    let service_proxy_name = options::service_proxy_name(settings);
    let mut client = Client::new(Follow { target, service_proxy_name, ..Follow::default() });
    client.cancel_on_signals()?;
    client.on_error(|report| print_error(&format!("keelson: waiting for the agent: {}", report.error)));
    let Some(state) = client.next().await else { return Ok(ExitCode::FAILURE) };
    let Selected { driver, backend, .. } = choice::select(settings, Access::Compare)?;
    let options = options(settings, backend)?;
    let backend = match driver.open(&options, Access::Compare) {
        // Without the capability to read the kernel, the text is the same as on a node without rules.
        Err(_) if as_text => driver.open(&options, Access::Print),
        opened => opened,
    };
    let mut preview = Preview::new(backend?, options, &state)?;
    if as_text {
        let mut text = String::new();
        preview.print(&mut text).context("cannot print the ruleset")?;
        print(text.trim_end())?;
    } else {
        let lines = preview.changes()?;
        match lines.is_empty() {
            true => print("no changes")?,
            false => print(&lines.join("\n"))?,
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn program(settings: Arc<Settings>, shown: &str) -> anyhow::Result<ExitCode> {
    let Selected { driver, backend, choice } = choice::select(&settings, Access::Program)?;
    let info = driver.info();
    tracing::info!(
        version = crate::build_info::VERSION,
        backend = info.name,
        requires = info.requirements,
        "proxy started"
    );
    memory::release_free_memory();
    let stop = CancellationToken::new();
    end_on_signals(stop.clone())?;
    let proxy = &settings.proxy;
    let mode = proxy.socket_mode.bits();
    let (debug, _file) = Bound::bind_within(proxy.listen.path(), mode, PATIENCE).await?.into_parts();
    let is_beside = proxy.service_proxy_name.is_some();
    let http = bind_http(proxy.http, is_beside).await?;
    let target = target(&settings)?;
    let config = RunConfig {
        target: target.clone(),
        healthz: proxy.healthz_bind_address,
        metrics: proxy.metrics_bind_address,
        bind_hard_fail: proxy.bind_address_hard_fail || is_beside,
        debug,
        http_hosts: crate::agent::host_names(&proxy.http_hosts),
        debug_name: proxy.listen.to_string(),
        http,
        settings: serde_json::from_str(shown).unwrap_or_default(),
        settings_text: settings_summary(&settings, backend, choice.as_ref()),
        notes: choice.iter().map(keelson_proxy::choice::Choice::describe).collect(),
    };
    let backends = Backends {
        own: driver,
        all: DRIVERS.iter().map(|(_, driver, _)| *driver).collect(),
        take_over: proxy.take_over,
    };
    let ready = || systemd::proxy_ready(&target.to_string());
    run_proxy(backends, options(&settings, backend)?, config, stop, ready).await?;
    tracing::info!("proxy stopped");
    Ok(ExitCode::SUCCESS)
}

/// `is_beside`: another proxy may run on this node, so an address in use is a mistake in the settings.
async fn bind_http(address: Option<SocketAddr>, is_beside: bool) -> anyhow::Result<Option<TcpListener>> {
    let Some(address) = address else { return Ok(None) };
    match TcpListener::bind(address).await {
        Ok(listener) => Ok(Some(listener)),
        Err(error) if is_beside => Err(error).with_context(|| {
            format!(
                "cannot listen on {address} (proxy.http); beside another proxy, set an address that is free, or \"\" for none"
            )
        }),
        // Services are more important than the page.
        Err(error) => {
            tracing::warn!(%address, %error, "cannot listen on proxy.http; the debug page is not served");
            Ok(None)
        }
    }
}

fn end_on_signals(stop: CancellationToken) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for signals")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for signals")?;
    let mut hangup = signal(SignalKind::hangup()).context("cannot listen for signals")?;
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
                // A reload that is meant for the agent must not end the proxy.
                _ = hangup.recv() => tracing::warn!("SIGHUP ignored; the proxy reads its settings only at start"),
            }
        }
        stop.cancel();
    });
    Ok(())
}

fn target(settings: &Settings) -> anyhow::Result<Target> {
    let spec = settings.proxy_target().context(
        "no unix socket of the agent's Endpoints API is configured; set proxy.target or endpoints.listen",
    )?;
    Ok(spec.to_string().parse()?)
}

#[cfg(test)]
mod tests {
    use keelson_proxy::{
        backend::{Backend, BackendError, BackendInfo},
        options::Options,
    };

    use super::*;

    struct Scripted {
        name: &'static str,
        removes: &'static str,
        fails: bool,
    }

    impl Driver for Scripted {
        fn info(&self) -> BackendInfo {
            BackendInfo { name: self.name, proxy_mode: "", requirements: "", has_chains: false }
        }

        fn open(&self, _: &Options, _: Access) -> Result<Box<dyn Backend>, BackendError> {
            Err(BackendError::new(&"not opened here", true))
        }

        fn remove_rules(&self, _: RuleOwner, removed: &mut dyn FnMut(String)) -> Result<(), BackendError> {
            removed(self.removes.to_owned());
            if self.fails { Err(BackendError::new(&"no netlink", true)) } else { Ok(()) }
        }
    }

    /// The first failure ended the command, and rules of the other backends stayed.
    #[test]
    fn a_backend_that_fails_does_not_keep_the_rules_of_others() {
        let scripted = |name, removes, fails| Scripted { name, removes, fails };
        let drivers =
            [scripted("a", "table a", true), scripted("b", "table b", false), scripted("c", "table c", true)];
        let mut removal = Removal::default();
        remove_rules(drivers.iter().map(|driver| driver as &dyn Driver), RuleOwner::Keelson, &mut removal);
        assert_eq!(removal.removed, ["table a", "table b", "table c"]);
        assert_eq!(
            removal.failed,
            ["the rules of the backend a: no netlink", "the rules of the backend c: no netlink"]
        );
    }
}
