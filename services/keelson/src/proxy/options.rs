//! The options of the proxy.
//!
//! Owns: [`options`] and [`settings_summary`]. In: checked settings, and the backend that is used. Out: options; lines for
//! people.

use keelson_config::{DetectLocalMode, IptablesVariant, NodePortAddresses, ProxyBackend, Settings};
use keelson_proxy::{
    addresses,
    choice::Choice,
    conntrack::ConntrackOptions,
    options::{
        self as proxy_options, DetectLocal, DirectReturnHook, DirectReturnOptions, EbpfOptions,
        IptablesOptions, IpvsOptions, Options, ProxyProtocol, RelayOptions,
    },
};

pub(super) fn service_proxy_name(settings: &Settings) -> String {
    settings.proxy.service_proxy_name.as_ref().map(ToString::to_string).unwrap_or_default()
}

/// `backend`: the one that is used.
pub(super) fn options(settings: &Settings, backend: ProxyBackend) -> anyhow::Result<Options> {
    let proxy = &settings.proxy;
    Ok(Options {
        service_proxy_name: service_proxy_name(settings),
        bind_address: proxy.bind_address.clone(),
        detect_local: match proxy.detect_local_mode {
            DetectLocalMode::ClusterCidr => DetectLocal::ClusterCidr(proxy.cluster_cidr.clone()),
            DetectLocalMode::NodeCidr => DetectLocal::NodeCidr,
            DetectLocalMode::BridgeInterface => DetectLocal::BridgeInterface(proxy.bridge_interface.clone()),
            DetectLocalMode::InterfaceNamePrefix => {
                DetectLocal::InterfaceNamePrefix(proxy.interface_name_prefix.clone())
            }
        },
        masquerade_all: proxy.masquerade_all,
        masquerade_bit: proxy.masquerade_bit,
        node_port_addresses: match &proxy.nodeport_addresses {
            NodePortAddresses::Unset if serves_all_addresses(backend) => {
                addresses::NodePortAddresses::Cidrs(Vec::new())
            }
            NodePortAddresses::Unset | NodePortAddresses::Primary => addresses::NodePortAddresses::Primary,
            NodePortAddresses::Networks(networks) => addresses::NodePortAddresses::Cidrs(networks.clone()),
        },
        allow_external_ips: proxy.allow_external_ips,
        flowtable_interfaces: proxy
            .flowtable_interfaces
            .iter()
            .map(|pattern| addresses::InterfacePattern::parse(&pattern.0))
            .collect(),
        iptables: IptablesOptions {
            variant: match proxy.iptables_variant {
                IptablesVariant::Auto => proxy_options::IptablesVariant::Auto,
                IptablesVariant::Legacy => proxy_options::IptablesVariant::Legacy,
                IptablesVariant::Nft => proxy_options::IptablesVariant::Nft,
            },
            localhost_node_ports: proxy.iptables_localhost_node_ports,
        },
        ipvs: IpvsOptions {
            scheduler: proxy.ipvs_scheduler.to_string(),
            strict_arp: proxy.ipvs_strict_arp,
            tcp_timeout: proxy.ipvs_tcp_timeout,
            tcp_fin_timeout: proxy.ipvs_tcp_fin_timeout,
            udp_timeout: proxy.ipvs_udp_timeout,
        },
        ebpf: EbpfOptions {
            cgroup: proxy.ebpf_cgroup.clone(),
            untracked_pods: proxy.ebpf_untracked_pods,
            pod_devices: patterns(&proxy.ebpf_pod_devices),
            direct_return: direct_return(settings),
        },
        conntrack: conntrack(settings),
        relay: relay_options(settings),
        min_sync_period: proxy.min_sync_period,
        sync_period: proxy.sync_period,
        max_staleness: (!proxy.max_staleness.is_zero()).then_some(proxy.max_staleness),
    })
}

pub(crate) fn conntrack(settings: &Settings) -> ConntrackOptions {
    let proxy = &settings.proxy;
    ConntrackOptions {
        max_per_core: proxy.conntrack_max_per_core,
        min: proxy.conntrack_min,
        tcp_established_timeout: proxy.conntrack_tcp_timeout_established,
        tcp_close_wait_timeout: proxy.conntrack_tcp_timeout_close_wait,
        tcp_be_liberal: proxy.conntrack_tcp_be_liberal,
        udp_timeout: proxy.conntrack_udp_timeout,
        udp_stream_timeout: proxy.conntrack_udp_timeout_stream,
        sysctl_dir: proxy.conntrack_sysctl_dir.clone(),
    }
}

/// Whether node ports are at all addresses of the node by default, as in kube-proxy's mode of the same name.
fn serves_all_addresses(backend: ProxyBackend) -> bool {
    matches!(backend, ProxyBackend::Iptables | ProxyBackend::Ipvs)
}

fn patterns(setting: &[keelson_config::InterfacePattern]) -> Vec<addresses::InterfacePattern> {
    setting.iter().map(|pattern| addresses::InterfacePattern::parse(&pattern.0)).collect()
}

fn direct_return(settings: &Settings) -> Option<DirectReturnOptions> {
    let proxy = &settings.proxy;
    (!proxy.ebpf_direct_return_devices.is_empty()).then(|| DirectReturnOptions {
        devices: patterns(&proxy.ebpf_direct_return_devices),
        hook: match proxy.ebpf_direct_return_hook {
            keelson_config::DirectReturnHook::Tc => DirectReturnHook::Tc,
            keelson_config::DirectReturnHook::Xdp => DirectReturnHook::Xdp,
        },
        nodes: proxy.ebpf_direct_return_nodes.clone(),
    })
}

fn relay_options(settings: &Settings) -> RelayOptions {
    let proxy = &settings.proxy;
    RelayOptions {
        drain_timeout: proxy.userspace_drain_timeout,
        stop_timeout: proxy.userspace_stop_timeout,
        udp_timeout: proxy.userspace_udp_timeout,
        drop_timeout: proxy.userspace_drop_timeout,
        max_sessions: usize::try_from(proxy.userspace_max_sessions).unwrap_or(usize::MAX),
        mapped_port_base: u16::try_from(proxy.userspace_mapped_port_base).unwrap_or_default(),
        proxy_protocol: match proxy.userspace_proxy_protocol {
            keelson_config::ProxyProtocol::Off => None,
            keelson_config::ProxyProtocol::V1 => Some(ProxyProtocol::V1),
            keelson_config::ProxyProtocol::V2 => Some(ProxyProtocol::V2),
        },
        transparent: proxy.userspace_transparent,
        redirect: proxy.userspace_routes,
        affinity_file: proxy.userspace_affinity_file.clone(),
    }
}

/// The settings that matter most, first.
pub(super) fn settings_summary(
    settings: &Settings,
    backend: ProxyBackend,
    choice: Option<&Choice>,
) -> Vec<String> {
    let proxy = &settings.proxy;
    let list = |items: Vec<String>| if items.is_empty() { "none".to_owned() } else { items.join(", ") };
    let detect = match proxy.detect_local_mode {
        DetectLocalMode::ClusterCidr => {
            format!("ClusterCIDR {}", list(proxy.cluster_cidr.iter().map(ToString::to_string).collect()))
        }
        DetectLocalMode::NodeCidr => "NodeCIDR".to_owned(),
        DetectLocalMode::BridgeInterface => format!("BridgeInterface {}", proxy.bridge_interface),
        DetectLocalMode::InterfaceNamePrefix => {
            format!("InterfaceNamePrefix {}", proxy.interface_name_prefix)
        }
    };
    let nodeports = match &proxy.nodeport_addresses {
        NodePortAddresses::Unset if serves_all_addresses(backend) => "all".to_owned(),
        NodePortAddresses::Unset | NodePortAddresses::Primary => "primary".to_owned(),
        NodePortAddresses::Networks(networks) => list(networks.iter().map(ToString::to_string).collect()),
    };
    let mut words = Vec::new();
    if let Some(choice) = choice {
        words.push(format!("backend: auto ({})", choice.name));
        words.extend(choice.rejected.iter().map(|rejected| format!("not chosen: {rejected}")));
    }
    if let Some(name) = &proxy.service_proxy_name {
        words.push(format!("service-proxy-name: {name}"));
    }
    words.extend([
        format!("detect-local: {detect}"),
        format!("nodeport-addresses: {nodeports}"),
        format!("masquerade-all: {}", proxy.masquerade_all),
        format!("masquerade-bit: {}", proxy.masquerade_bit),
        format!("sync-period: {:?}", proxy.sync_period),
        format!("max-staleness: {:?}", proxy.max_staleness),
        format!("min-sync-period: {:?}", proxy.min_sync_period),
    ]);
    if !proxy.flowtable_interfaces.is_empty() {
        let names = proxy.flowtable_interfaces.iter().map(|pattern| pattern.0.clone());
        words.push(format!("flowtable-interfaces: {}", list(names.collect())));
    }
    if !proxy.bind_address.is_empty() {
        words.push(format!(
            "bind-address: {}",
            list(proxy.bind_address.iter().map(ToString::to_string).collect())
        ));
    }
    words
}
