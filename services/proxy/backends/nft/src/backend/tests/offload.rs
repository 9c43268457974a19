//! Offload of established flows, with a fake of the kernel's flowtables: the kernel may have none.

use std::collections::{BTreeMap, BTreeSet};

use keelson_proxy::addresses::InterfacePattern;

use super::*;
use crate::{
    flowtable::FoundFlowtable,
    ruleset::{FLOWTABLE, Rule},
};

#[derive(Clone, Default)]
struct FakeFlowtables {
    flowtables: BTreeMap<String, FoundFlowtable>,
    chain: Option<Chain>,
    rules: Vec<Rule>,
    /// Number of flowtables ever created.
    created: usize,
}

#[derive(Default)]
struct Shared {
    families: [FakeFlowtables; 2],
    interfaces: BTreeSet<String>,
    has_none: bool,
    /// Names whose addition failed.
    refused: Vec<String>,
}

#[derive(Clone, Default)]
struct Kernel(Arc<Mutex<Shared>>);

impl Kernel {
    fn open(&self, options: Options) -> Stage {
        let shared = self.clone();
        let opened = open(move |kernel| FakeKernel { kernel, shared: shared.clone() }, options);
        let mut stage = Stage::new(opened.unwrap(), Script::default());
        stage.set(1, 0, 3);
        stage
    }

    /// With a Service programmed, and the offload enabled.
    fn offloading() -> (Self, Stage) {
        let kernel = Self::default();
        let mut stage = kernel.open(offloading(&PATTERNS));
        stage.begin();
        (kernel, stage)
    }

    /// Sets the node's interfaces, and lets the flowtable follow.
    fn apply_interfaces(&self, stage: &mut Stage, list: &[(&str, usize)]) {
        self.interfaces(stage, list);
        stage.later(Duration::ZERO);
    }

    /// Sets the node's interfaces, as name and index. Removed ones leave the flowtables, as in the kernel.
    fn interfaces(&self, stage: &mut Stage, list: &[(&str, usize)]) {
        let interfaces: Vec<Interface> =
            list.iter().map(|&(name, index)| Interface { name: name.to_owned(), index }).collect();
        let mut shared = self.0.lock().unwrap();
        shared.interfaces = interfaces.iter().map(|interface| interface.name.clone()).collect();
        drop(shared);
        stage.sync_loop.set_interfaces(&interfaces);
    }

    fn lose(&self, name: &str) {
        for family in &mut self.0.lock().unwrap().families {
            for flowtable in family.flowtables.values_mut() {
                flowtable.devices.remove(name);
            }
        }
    }

    fn created(&self) -> usize {
        self.0.lock().unwrap().families[0].created
    }

    fn devices(&self) -> Option<Vec<String>> {
        let shared = self.0.lock().unwrap();
        let flowtable = shared.families[0].flowtables.get(FLOWTABLE)?;
        Some(flowtable.devices.iter().cloned().collect())
    }

    /// A change by another program.
    fn change(&self, change: impl FnOnce(&mut FakeFlowtables)) {
        change(&mut self.0.lock().unwrap().families[0]);
        nft(&["add table ip other-program; delete table ip other-program"]);
    }

    fn check(&self, stage: &mut Stage) -> Option<Outcome> {
        stage.now += READ_INTERVAL;
        let families = stage.sync_loop.begin_checks(stage.now);
        let mut repaired = None;
        for family in families {
            stage.observer.read(family).unwrap();
            let synced = stage.check(family);
            repaired = repaired.or(synced.map(|synced| synced.result.unwrap()));
        }
        repaired
    }
}

struct FakeKernel {
    kernel: Netlink,
    shared: Kernel,
}

impl FakeKernel {
    fn flowtables(&self, family: Family) -> FakeFlowtables {
        self.shared.0.lock().unwrap().families[family as usize].clone()
    }

    fn with(&self, family: Family, found: Option<Found>) -> Option<Found> {
        let FakeFlowtables { flowtables, rules, chain, .. } = self.flowtables(family);
        let chain = chain.unwrap_or(Chain::FilterForwardOffload);
        found.map(|found| found.with_flowtables(family, flowtables, (chain, &rules)))
    }
}

impl NfTables for FakeKernel {
    fn netlink(&mut self) -> &mut Netlink {
        &mut self.kernel
    }

    fn commit(&mut self, family: Family, changes: &[Change]) -> Result<(), KernelError> {
        let mut after = self.flowtables(family);
        let mut real = Vec::new();
        for (index, change) in changes.iter().enumerate() {
            let refused = |errno| {
                let change = format!("{change:?}");
                Err(KernelError::Refused { family, index, change, errno, message: None })
            };
            let ours = FoundFlowtable { flags: 2, ..FoundFlowtable::default() };
            match change {
                Change::MakeFlowtable if after.flowtables.contains_key(FLOWTABLE) => {
                    return refused(Errno::EEXIST);
                }
                Change::MakeFlowtable => {
                    after.created += 1;
                    after.flowtables.insert(FLOWTABLE.to_owned(), ours);
                }
                Change::DeleteFlowtable(name) if name == FLOWTABLE && !after.rules.is_empty() => {
                    return refused(Errno::EBUSY);
                }
                Change::DeleteFlowtable(name) => {
                    after.flowtables.remove(name);
                }
                Change::AddDevices(names) => {
                    let mut shared = self.shared.0.lock().unwrap();
                    if let Some(gone) = names.iter().find(|name| !shared.interfaces.contains(*name)) {
                        let gone = gone.clone();
                        shared.refused.push(gone);
                        return refused(Errno::ENOENT);
                    }
                    after.flowtables.get_mut(FLOWTABLE).unwrap().devices.extend(names.iter().cloned());
                }
                Change::RemoveDevices(names) => {
                    let devices = &mut after.flowtables.get_mut(FLOWTABLE).unwrap().devices;
                    devices.retain(|device| !names.contains(device));
                }
                Change::Rules(chain, rules) if Chain::OFFLOAD.contains(chain) => {
                    assert!(rules.is_empty() || after.flowtables.contains_key(FLOWTABLE));
                    (after.chain, after.rules) = (Some(*chain), rules.clone());
                    real.push(Change::Rules(*chain, Vec::new()));
                }
                other => {
                    let is_chain =
                        |chain: &Chain| matches!(other, Change::DeleteChain(deleted) if deleted == chain);
                    if *other == Change::DeleteTable || after.chain.as_ref().is_some_and(is_chain) {
                        after.rules.clear();
                    }
                    if *other == Change::DeleteTable {
                        after.flowtables.clear();
                    }
                    real.push(other.clone());
                }
            }
        }
        if real
            .iter()
            .all(|change| matches!(change, Change::Rules(chain, _) if Chain::OFFLOAD.contains(chain)))
        {
            // So that the kernel counts a transaction.
            let base = initial_base(family, &options());
            real.push(Change::Rules(Chain::Reject, rules(&base, Chain::Reject)));
        }
        self.kernel.commit(family, &real)?;
        self.shared.0.lock().unwrap().families[family as usize] = after;
        Ok(())
    }

    fn read(&mut self, family: Family) -> Result<Option<Found>, KernelError> {
        let found = self.kernel.read(family)?;
        Ok(self.with(family, found))
    }

    fn read_structure(&mut self, family: Family) -> Result<Option<Found>, KernelError> {
        let found = self.kernel.read_structure(family)?;
        Ok(self.with(family, found))
    }

    fn read_flowtable(&mut self, family: Family) -> Result<Option<FoundFlowtable>, KernelError> {
        Ok(self.flowtables(family).flowtables.remove(FLOWTABLE))
    }

    fn try_flowtable(&mut self, _: Family) -> Result<(), KernelError> {
        let unsupported =
            KernelError::Unsupported { feature: "nftables flowtables".to_owned(), errno: Errno::ENOENT };
        if self.shared.0.lock().unwrap().has_none { Err(unsupported) } else { Ok(()) }
    }
}

fn offloading(patterns: &[&str]) -> Options {
    let flowtable_interfaces = patterns.iter().map(|text| InterfacePattern::parse(text)).collect();
    Options { flowtable_interfaces, ..options() }
}

fn names(list: &[&str]) -> Option<Vec<String>> {
    Some(list.iter().map(|name| (*name).to_owned()).collect())
}

const PATTERNS: [&str; 2] = ["eth0", "veth*"];

#[test]
fn the_devices_of_the_flowtable_follow_the_interfaces() {
    in_namespace(|| {
        let (kernel, mut stage) = Kernel::offloading();
        assert_eq!(kernel.devices(), names(&[]), "the flowtable is there before its devices");
        kernel.apply_interfaces(&mut stage, &[("lo", 1), ("eth0", 2), ("veth1", 3), ("cni0", 4)]);
        assert_eq!(kernel.devices(), names(&["eth0", "veth1"]));
        assert_eq!(kernel.0.lock().unwrap().families[0].rules.len(), 2);

        // One is removed, one is added, one is created again under the same name.
        kernel.lose("eth0");
        kernel.lose("veth1");
        kernel.apply_interfaces(&mut stage, &[("eth0", 9), ("veth2", 5)]);
        assert_eq!(kernel.devices(), names(&["eth0", "veth2"]));

        // A device that left without a notification is added again after a while.
        kernel.lose("veth2");
        stage.later(Duration::from_secs(1));
        assert_eq!(kernel.devices(), names(&["eth0"]));
        stage.later(Duration::from_secs(30));
        assert_eq!(kernel.devices(), names(&["eth0", "veth2"]));

        // Transactions of devices do not count as another program's.
        let reads = stage.sync_loop.begin_checks(stage.now + READ_INTERVAL);
        assert_eq!(reads, [], "nothing is checked");
        stage.assert_exact();
    });
}

#[test]
fn a_removed_interface_delays_no_other_interface_or_service() {
    in_namespace(|| {
        let (kernel, mut stage) = Kernel::offloading();
        kernel.interfaces(&mut stage, &[("veth1", 1), ("veth2", 2), ("veth3", 3)]);
        kernel.0.lock().unwrap().interfaces.remove("veth2");
        stage.set(2, 0, 3);
        stage.now += Duration::from_secs(1);
        assert!(!stage.sync().is_nothing());
        stage.later(Duration::ZERO);
        assert_eq!(kernel.devices(), names(&["veth1", "veth3"]));
        assert!(kernel.0.lock().unwrap().refused.iter().all(|name| name == "veth2"));
        assert_eq!(
            stage.offload(Family::V4).as_deref(),
            Some("enabled (interfaces: 3)"),
            "the interface was removed; a notification follows"
        );
    });
}

#[test]
fn a_restart_keeps_the_flowtable_and_turning_it_off_removes_it() {
    in_namespace(|| {
        let (kernel, mut stage) = Kernel::offloading();
        kernel.apply_interfaces(&mut stage, &[("eth0", 2)]);

        let mut stage = kernel.open(offloading(&PATTERNS));
        let [v4, v6] = stage.begin().try_into().unwrap();
        assert!(v4.result.unwrap().is_nothing() && v6.result.unwrap().is_nothing());
        stage.later(Duration::ZERO);
        assert_eq!(kernel.devices(), names(&["eth0"]), "until the interfaces are known, nothing is removed");
        kernel.apply_interfaces(&mut stage, &[("eth0", 2)]);
        assert_eq!(kernel.devices(), names(&["eth0"]));

        let mut stage = kernel.open(options());
        stage.begin();
        assert_eq!(kernel.devices(), None);
        stage.assert_exact();
        assert!(!nft(&["list", "ruleset"]).contains("offload"));
        assert_eq!(stage.offload(Family::V4), None);

        let mut stage = kernel.open(offloading(&PATTERNS));
        stage.begin();
        assert_eq!(kernel.devices(), names(&[]), "and on again");
        stage.assert_exact();
    });
}

#[test]
fn foreign_changes_of_flowtables_are_repaired() {
    in_namespace(|| {
        let (kernel, mut stage) = Kernel::offloading();
        kernel.apply_interfaces(&mut stage, &[("eth0", 2)]);
        type Damage = fn(&mut FakeFlowtables);
        let damages: [(&str, Damage); 4] = [
            ("rules deleted", |family| family.rules.clear()),
            ("flowtable deleted", |family| {
                family.rules.clear();
                family.flowtables.clear();
            }),
            ("flowtable made otherwise", |family| {
                family.flowtables.get_mut(FLOWTABLE).unwrap().priority = 7;
            }),
            ("a second flowtable", |family| {
                family.flowtables.insert("other".to_owned(), FoundFlowtable::default());
            }),
        ];
        for (what, damage) in damages {
            kernel.change(damage);
            let outcome = kernel.check(&mut stage).expect(what);
            assert!(outcome.structure > 0, "{what}: {outcome:?}");
            stage.later(Duration::from_secs(1));
            stage.assert_exact();
            assert_eq!(kernel.devices(), names(&["eth0"]), "{what}");
            assert_eq!(kernel.0.lock().unwrap().families[0].flowtables.len(), 1, "{what}");
        }
        kernel.change(|_| {});
        assert!(kernel.check(&mut stage).is_none(), "nothing is left to repair");
    });
}

#[test]
fn udp_is_not_offloaded_if_the_kernel_cannot_delete_its_flows() {
    in_namespace(|| {
        let (kernel, mut stage) = Kernel::offloading();
        kernel.apply_interfaces(&mut stage, &[("eth0", 2)]);
        let rules = || kernel.0.lock().unwrap().families[0].rules.len();
        assert_eq!((rules(), kernel.created()), (2, 1));

        assert!(stage.sync_loop.stop_udp_offload(Family::V4, stage.now));
        assert!(!stage.sync_loop.stop_udp_offload(Family::V4, stage.now));
        stage.later(Duration::ZERO);
        assert_eq!((rules(), kernel.created()), (1, 2), "another flowtable, so that no flow of UDP is left");
        assert_eq!(kernel.devices(), names(&["eth0"]));
        stage.assert_exact();
        let words = stage.offload(Family::V4).unwrap();
        assert_eq!(words, "enabled for TCP (interfaces: 1)");
        assert_eq!(stage.offload(Family::V6).unwrap(), "enabled (interfaces: 1)");

        // The kernel keeps its state over a restart.
        let mut stage = kernel.open(offloading(&PATTERNS));
        stage.begin();
        kernel.apply_interfaces(&mut stage, &[("eth0", 2)]);
        assert_eq!((rules(), kernel.created()), (1, 2));
        let mut stage = kernel.open(options());
        stage.begin();
        assert_eq!(kernel.devices(), None);
        stage.assert_exact();
    });
}

#[test]
fn without_flowtables_everything_else_is_programmed() {
    in_namespace(|| {
        let kernel = Kernel::default();
        kernel.0.lock().unwrap().has_none = true;
        let mut stage = kernel.open(offloading(&PATTERNS));
        assert!(!stage.begin().is_empty());
        kernel.interfaces(&mut stage, &[("eth0", 2)]);
        stage.later(Duration::from_secs(1));
        assert!(stage.sync_loop.is_current());
        assert_eq!(kernel.devices(), None);
        stage.assert_exact();
        let words = stage.offload(Family::V4).unwrap();
        assert!(words.contains("disabled") && words.contains("nftables flowtables"), "{words}");
    });
}

#[test]
fn the_text_has_the_flowtable() {
    in_namespace(|| {
        let (kernel, mut stage) = Kernel::offloading();
        kernel.interfaces(&mut stage, &[("eth0", 2), ("veth1", 3)]);
        let mut text = String::new();
        stage.sync_loop.backend().ruleset()(&mut text).unwrap();
        for part in [
            "\tflowtable service-flows {\n\t\thook ingress priority filter\n\t\tdevices = { \"eth0\", \"veth1\" }\n\t\tcounter\n\t}\n",
            "\tchain filter-forward-offload {\n\t\ttype filter hook forward priority 200; policy accept;\n\
             \t\tct state established ct status dnat meta l4proto tcp flow add @service-flows\n\
             \t\tct state established ct status dnat meta l4proto udp flow add @service-flows\n\t}\n",
        ] {
            assert!(text.contains(part), "{text}");
        }
    });
}
