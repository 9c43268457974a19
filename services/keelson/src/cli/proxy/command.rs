//! `keelson proxy`: runs a backend, or inspects a running one.
//!
//! Owns: its arguments. In: the command line. Out: [`crate::proxy`] runs or removes the rules; `keelson proxy state` and the
//! like ask a running proxy.

use std::process::ExitCode;

use clap::{Args, Subcommand};

use super::{ProxyInspectCommand, run_proxy_inspect};
use crate::{output::print_error, proxy, settings::SettingsArgs};

/// `keelson proxy`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    keelson proxy --backend nft                       run the service proxy on this node\n  \
    keelson proxy --backend auto                      run it with the best backend of this node\n  \
    keelson proxy --backend nft --dry-run             print the changes that it would make\n  \
    keelson proxy --backend nft --print | nft -c -f - check the rules that it would program\n  \
    keelson proxy state                               show sync status and what is wrong\n  \
    keelson proxy explain 10.96.0.10:80               show which rules a packet matches\n  \
    keelson proxy cleanup                             remove all rules of Keelson")]
pub(crate) struct ProxyArgs {
    #[command(subcommand)]
    command: Option<ProxyCommand>,
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    settings: SettingsArgs,
}

#[derive(Debug, Subcommand)]
enum ProxyCommand {
    #[command(flatten)]
    Look(ProxyInspectCommand),
    /// Remove all rules of Keelson from this node. Services stop working until a proxy programs them again.
    Cleanup {
        /// Remove the rules of a kube-proxy instead: nftables tables, iptables chains (nft and legacy), and the
        /// virtual servers, IP sets and interface of mode ipvs.
        #[arg(long)]
        kube_proxy: bool,
        /// Remove only the rules of this backend, for example beside a proxy with another one.
        #[arg(long, value_name = "BACKEND", conflicts_with = "kube_proxy")]
        backend: Option<String>,
    },
}

/// Flags of a backend; each is short for a setting.
#[derive(Debug, Args)]
struct RunArgs {
    /// Backend that programs the Services [default: proxy.backend].
    #[arg(long, value_name = "BACKEND")]
    backend: Option<String>,
    /// Serve the Services with this value of the label service.kubernetes.io/service-proxy-name, beside another proxy
    /// [default: proxy.service_proxy_name].
    #[arg(long, value_name = "NAME")]
    service_proxy_name: Option<String>,
    /// Address of the agent's Endpoints API [default: proxy.target].
    #[arg(long, value_name = "TARGET")]
    target: Option<String>,
    /// Addresses that serve node ports: comma-separated networks, or primary [default: proxy.nodeport_addresses].
    #[arg(long, value_name = "CIDR,...")]
    nodeport_addresses: Option<String>,
    /// Networks of the cluster's pods, at most one per IP family [default: proxy.cluster_cidr].
    #[arg(long, value_name = "CIDR,...")]
    cluster_cidr: Option<String>,
    /// Interfaces for which established connections to Services are offloaded to a flowtable: names, or prefixes with `*`
    /// [default: proxy.flowtable_interfaces].
    #[arg(long, value_name = "INTERFACE,...")]
    flowtable_interfaces: Option<String>,
    /// Print the full ruleset as text for the backend's programs (`nft -f`, `iptables-restore`) and exit, without
    /// changing anything.
    #[arg(long)]
    print: bool,
    /// Print the changes that would be made, one per line, and exit, without changing anything.
    #[arg(long, conflicts_with = "print")]
    dry_run: bool,
}

impl RunArgs {
    /// The first flag that is set, to reject it where it has no effect.
    fn first_flag(&self) -> Option<&'static str> {
        [
            ("--backend", self.backend.is_some()),
            ("--service-proxy-name", self.service_proxy_name.is_some()),
            ("--target", self.target.is_some()),
            ("--nodeport-addresses", self.nodeport_addresses.is_some()),
            ("--cluster-cidr", self.cluster_cidr.is_some()),
            ("--flowtable-interfaces", self.flowtable_interfaces.is_some()),
            ("--print", self.print),
            ("--dry-run", self.dry_run),
        ]
        .into_iter()
        .find_map(|(flag, is_set)| is_set.then_some(flag))
    }

    fn into_settings(self, mut settings: SettingsArgs) -> SettingsArgs {
        for (key, value) in [
            ("backend", self.backend),
            ("service_proxy_name", self.service_proxy_name),
            ("target", self.target),
            ("nodeport_addresses", self.nodeport_addresses),
            ("cluster_cidr", self.cluster_cidr),
            ("flowtable_interfaces", self.flowtable_interfaces),
        ] {
            settings.sets.extend(value.map(|value| format!("proxy.{key}={value}")));
        }
        settings
    }
}

pub(crate) fn run_proxy(args: ProxyArgs) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    if let (Some(_), Some(flag)) = (&args.command, args.run.first_flag()) {
        print_error(&format!("keelson: {flag} is only valid for running a proxy, not with a subcommand"));
        return Ok(ExitCode::from(2));
    }
    match args.command {
        Some(ProxyCommand::Look(look)) => runtime.block_on(run_proxy_inspect(look, &args.settings)),
        Some(ProxyCommand::Cleanup { kube_proxy, backend }) => {
            proxy::clean_up(kube_proxy, backend.as_deref())
        }
        None => {
            let (print, dry_run) = (args.run.print, args.run.dry_run);
            let loaded = match args.run.into_settings(args.settings).load_or_print_error() {
                Ok(loaded) => loaded,
                Err(code) => return Ok(code),
            };
            if !print && !dry_run {
                return proxy::run(loaded, &runtime);
            }
            for note in loaded.kube_proxy.iter().flatten() {
                print_error(&format!("keelson: {note}"));
            }
            runtime.block_on(proxy::preview(&loaded.settings, print))
        }
    }
}
