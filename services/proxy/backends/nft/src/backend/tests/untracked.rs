//! Flows between pods that are not tracked: when that begins and ends.

use std::sync::atomic::{AtomicUsize, Ordering};

use keelson_proxy::conntrack::ConntrackError;

use super::*;

/// Translated flows that stand against it, as conntrack has them.
type Flows = Arc<AtomicUsize>;

struct Counting {
    kernel: Netlink,
    flows: Flows,
}

impl NfTables for Counting {
    fn netlink(&mut self) -> &mut Netlink {
        &mut self.kernel
    }

    fn translated_flows(&mut self, _: Family, pods: IpNet) -> Result<usize, ConntrackError> {
        assert_eq!(pods.to_string(), "10.244.0.0/16");
        Ok(self.flows.load(Ordering::Relaxed))
    }
}

struct Proxy {
    backend: NftBackend,
    flows: Flows,
    now: Instant,
}

impl Proxy {
    fn start(flows: usize, untracked_pods: bool) -> Self {
        let flows = Flows::new(AtomicUsize::new(flows));
        let count = flows.clone();
        let connect = move || {
            let counting = Counting { kernel: Netlink::open()?, flows: count.clone() };
            Ok(Box::new(counting) as Box<dyn NfTables>)
        };
        let backend = NftBackend::open(connect, &options(), Access::Program).unwrap();
        let mut proxy = Self { backend, flows, now: Instant::now() };
        proxy.configure(untracked_pods);
        proxy
    }

    fn configure(&mut self, untracked_pods: bool) {
        let config = options().node_config(&node(), &[], Family::V4).unwrap();
        self.backend.set_node(NodeConfig { untracked_pods, ..config });
        self.backend.sync(Family::V4, self.now).unwrap();
    }

    /// Maintenance as it is done each second, after this time.
    fn after(&mut self, seconds: u64) -> &mut Self {
        self.now += Duration::from_secs(seconds);
        self.backend.maintain(Family::V4, self.now).unwrap();
        self
    }

    /// Whether packets between pods are kept out of conntrack, and whether translated ones are masqueraded.
    fn rules(&self) -> (bool, bool) {
        let listing = Command::new("nft").args(["list", "table", "ip", "keelson"]).output().unwrap();
        let text = String::from_utf8(listing.stdout).unwrap();
        let masquerades = "ip saddr 10.244.0.0/16 ip daddr 10.244.0.0/16 meta l4proto tcp masquerade";
        (text.contains("notrack"), text.contains(masquerades))
    }

    fn status(&self) -> String {
        self.backend.features().join("\n")
    }
}

#[test]
fn it_begins_when_no_translated_flow_is_left() {
    in_namespace(|| {
        let mut proxy = Proxy::start(2, true);
        assert_eq!(proxy.rules(), (false, true), "translated flows are told apart first");
        assert_eq!(proxy.after(1).rules(), (false, true));
        assert!(
            proxy.status().contains("still tracked: flows that were translated before have to end first: 2"),
            "{}",
            proxy.status()
        );
        proxy.flows.store(0, Ordering::Relaxed);
        assert_eq!(proxy.after(1).rules(), (false, true), "conntrack is not asked each second");
        assert_eq!(proxy.after(30).rules(), (true, true));
        assert!(proxy.status().contains("10.244.0.0/16 are not tracked"), "{}", proxy.status());
        // What comes later is masqueraded, and stands against nothing.
        proxy.flows.store(1, Ordering::Relaxed);
        assert_eq!(proxy.after(60).rules(), (true, true));
        let changes = proxy.backend.changes().unwrap();
        assert!(
            changes.iter().all(|line| line.contains(" ip6 keelson")),
            "IPv6 is not configured: {changes:?}"
        );
    });
}

#[test]
fn it_outlives_the_process_and_ends_with_the_setting() {
    in_namespace(|| {
        assert_eq!(Proxy::start(0, true).after(1).rules(), (true, true));
        let mut proxy = Proxy::start(7, true);
        assert_eq!(proxy.rules(), (true, true), "of the former process");
        proxy.configure(false);
        assert_eq!(proxy.rules(), (false, false));
        proxy.after(1);
        assert!(!proxy.status().contains("tracked"), "{}", proxy.status());
        // It begins anew.
        proxy.configure(true);
        assert_eq!(proxy.after(60).rules(), (false, true));
    });
}

#[test]
fn another_program_that_removes_the_chain_is_repaired() {
    in_namespace(|| {
        let mut proxy = Proxy::start(0, true);
        proxy.after(1);
        let delete = ["delete", "chain", "ip", "keelson", "raw-prerouting"];
        assert!(Command::new("nft").args(delete).status().unwrap().success());
        assert_eq!(proxy.rules(), (false, true));
        assert!(proxy.backend.begin_check(Family::V4).unwrap());
        proxy.backend.observer().unwrap().read(Family::V4).unwrap();
        assert!(
            matches!(proxy.backend.check(Family::V4, proxy.now), Check::Done(Ok(outcome)) if outcome.repaired)
        );
        assert_eq!(proxy.rules(), (true, true));
    });
}
