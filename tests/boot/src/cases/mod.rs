//! The cases, in the order in which they run on one node.
//!
//! Owns: the list of cases. In: a node. Out: what each case saw, or why it failed.

mod documents;
mod install;
mod kube_proxy;
mod kubelet;
mod power;
mod proxy;
mod service;
mod uninstall;
mod upgrade;

use anyhow::Result;

use crate::node::Node;

pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// What was seen.
    pub(crate) run: fn(&mut Node) -> Result<String>,
}

/// The first case that another may do without.
pub(crate) const FIRST: usize = 2;

pub(crate) const CASES: &[Case] = &[
    Case { name: "the package starts nothing and changes no limit", run: install::install },
    Case { name: "units are enabled and the agent answers", run: install::enable },
    Case { name: "a kubelet is put behind the agent, and taken away", run: kubelet::attach_and_bypass },
    Case { name: "members of a group may do what the group is for", run: install::groups },
    Case { name: "the sandbox and the limits of the unit are in effect", run: service::sandbox },
    Case {
        name: "a stop waits for no pull, and a connection starts the agent",
        run: service::socket_activation,
    },
    Case { name: "a drop-in moves the socket of the agent", run: service::moved_socket },
    Case { name: "the watchdog ends an agent that hangs", run: service::watchdog },
    Case {
        name: "a crash loop goes on until it is repaired, and connections wait",
        run: service::crash_loop,
    },
    Case { name: "no caller notices restarts and kills", run: service::restarts },
    Case { name: "no caller notices an upgrade and a downgrade", run: upgrade::upgrade },
    Case { name: "kube-proxy is replaced, and comes back", run: kube_proxy::replace_and_go_back },
    Case { name: "the commands of the documents run", run: documents::run },
    Case { name: "the proxy has the rights that it needs and no others", run: proxy::start },
    Case { name: "connections outlive an upgrade and a downgrade of the proxy", run: proxy::upgrade },
    Case { name: "rules come back after a reload of nftables", run: proxy::reload_of_nftables },
    Case { name: "a reboot starts everything", run: power::reboot },
    Case { name: "a power cut under load loses nothing", run: power::cut },
    Case { name: "an uninstalled node has nothing left", run: uninstall::uninstall },
];
