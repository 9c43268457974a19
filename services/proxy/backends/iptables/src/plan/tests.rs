//! Changes: any history leads to the same rules as a start from scratch.

use std::collections::{BTreeMap, BTreeSet};

use keelson_client::ServiceName;
use keelson_proxy::model::{Endpoint, Family, Protocol, ServicePort};
use proptest::prelude::*;

use super::{Changes, NodeFacts, Plan, Wanted};
use crate::{
    names::{SetKind, SetName, Table, rank},
    ruleset::Plan as _,
    save::Found,
    testing::service_port,
};

fn facts() -> NodeFacts {
    NodeFacts {
        mark: 0x4000,
        masquerade_all: false,
        detector: None,
        node_ips: Vec::new(),
        node_ports: keelson_proxy::addresses::Match::AllLocal,
        serves_loopback: false,
        drops_invalid: true,
    }
}

fn service(number: u8) -> ServiceName {
    ServiceName::new("default", &format!("service-{number}"))
}

/// Of 40 Services; some claim the addresses and node ports of others.
fn port() -> impl Strategy<Value = ServicePort> {
    let policies =
        (any::<bool>(), any::<bool>(), prop::bool::weighted(0.8), 0..3_u32, prop::bool::weighted(0.2));
    let endpoints = proptest::collection::btree_set((1..=3_u8, 1..=2_u16), 0..5);
    (0..40_u8, policies, endpoints, 0..6_u8, prop::bool::weighted(0.7)).prop_map(
        |(number, (internal, external, any, affinity, ranges), endpoints, external_ip, tcp)| {
            let ip = [10, 96, number % 8, number].into();
            let mut port = service_port(&service(number), "", ip, 80);
            if !tcp {
                port.name.protocol = Protocol::Udp;
            }
            (port.internal_local, port.external_local, port.affinity_seconds) =
                (internal, external, affinity * 60);
            port.external_ips = vec![[192, 0, 2, external_ip].into()];
            port.load_balancer_ips = vec![[192, 0, 3, external_ip].into()];
            port.node_port = 30_000 + u16::from(number % 30) * 7;
            if ranges {
                port.source_ranges = vec!["198.51.100.0/24".parse().unwrap()];
            }
            port.has_any = any;
            let endpoint = |(host, port)| Endpoint { ip: [10, 244, number % 3, host].into(), port };
            if any {
                port.cluster = endpoints.into_iter().map(endpoint).collect();
                port.local = port.cluster.iter().take(2).copied().collect();
                port.on_node.clone_from(&port.local);
            }
            port
        },
    )
}

/// A kernel that does what the texts say.
#[derive(Debug, Default, PartialEq, Eq)]
struct Model {
    chains: BTreeMap<(Table, String), String>,
    sets: BTreeMap<String, BTreeSet<String>>,
}

impl Model {
    fn apply(&mut self, changes: &Changes) {
        for set in &changes.create_sets {
            self.sets.entry(set.to_string()).or_default();
        }
        for (set, entry) in &changes.add_entries {
            assert!(
                self.sets.get_mut(set.as_str()).unwrap().insert(entry.clone()),
                "added twice: {set} {entry}"
            );
        }
        for (table, chain, text) in &changes.chains {
            self.chains.insert((*table, chain.clone()), text.clone());
        }
        for (table, chain) in &changes.delete_chains {
            assert!(self.chains.remove(&(*table, chain.clone())).is_some(), "{chain} does not exist");
        }
        for (set, entry) in &changes.delete_entries {
            assert!(self.sets.get_mut(set.as_str()).unwrap().remove(entry), "deleted twice: {set} {entry}");
        }
        for set in &changes.destroy_sets {
            assert!(self.sets.remove(set).is_some(), "{set} does not exist");
        }
        self.check_references();
    }

    /// Every chain and set that a rule names exists, and no chain leads to one of its own rank.
    fn check_references(&self) {
        for ((table, chain), text) in &self.chains {
            for line in text.lines() {
                let words: Vec<&str> = line.split(' ').collect();
                for pair in words.windows(2) {
                    match *pair {
                        ["-j" | "-g", to] if to.starts_with("KEELSON-") => {
                            assert!(self.chains.contains_key(&(*table, to.to_owned())), "{line}");
                            assert!(rank(to) < rank(chain), "{line}");
                        }
                        ["--match-set" | "--add-set", set] => assert!(self.sets.contains_key(set), "{line}"),
                        _ => {}
                    }
                }
            }
        }
    }
}

fn from_scratch(plan: &Plan) -> Model {
    let mut model = Model::default();
    model.apply(&plan.wanted().changes(&Found::default(), true));
    model
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_history_gives_the_rules_of_a_start(
        steps in proptest::collection::vec(proptest::collection::vec((port(), any::<bool>()), 1..6), 1..20)
    ) {
        let mut plan = Plan::new(Family::V4, facts());
        let mut model = Model::default();
        model.apply(&plan.take_wanted().changes(&Found::default(), true));
        for step in steps {
            for (port, is_present) in step {
                let service = port.name.service.clone();
                plan.set(&service, if is_present { vec![port] } else { Vec::new() });
            }
            model.apply(&plan.take_changes().unwrap());
            prop_assert_eq!(&model, &from_scratch(&plan));
            prop_assert!(plan.take_changes().unwrap().is_empty());
        }
    }

    #[test]
    fn what_is_found_is_what_was_written(ports in proptest::collection::vec(port(), 0..40)) {
        let mut plan = Plan::new(Family::V4, facts());
        ports.into_iter().for_each(|port| plan.set(&port.name.service.clone(), vec![port]));
        let wanted = plan.wanted();
        prop_assert!(wanted.changes(&found(&wanted), true).is_empty());
    }
}

/// As the programs print it, with rules of others.
fn found(wanted: &Wanted) -> Found {
    let mut found = Found::default();
    for &table in Plan::TABLES {
        let mut text = format!("# Generated\n*{table}\n:KUBE-SERVICES - [0:0]\n");
        for (built_in, _) in table.jumps() {
            text.push_str(&format!(":{built_in} ACCEPT [12:34]\n"));
        }
        wanted.chains(table).keys().for_each(|chain| text.push_str(&format!(":{chain} - [0:0]\n")));
        for (built_in, chain) in table.jumps() {
            text.push_str(&format!("-A {built_in} -j {chain}\n-A {built_in} -j KUBE-SERVICES\n"));
        }
        text.push_str("-A KUBE-SERVICES -j RETURN\n");
        wanted.chains(table).values().for_each(|rules| text.push_str(rules));
        text.push_str("COMMIT\n");
        found.add_rules(table, &text);
    }
    let mut text = "create other hash:ip family inet hashsize 64\nadd other 1.2.3.4\n".to_owned();
    for (set, entries) in &wanted.sets {
        text.push_str(&format!("{} bucketsize 12 initval 0x1\n", set.create(Family::V4)));
        entries.iter().for_each(|entry| text.push_str(&format!("add {set} {entry}\n")));
    }
    found.add_sets(Family::V4, &text);
    assert!(found.kube_proxy.is_some());
    found
}

#[test]
fn large_changes_are_split_in_the_order_of_references() {
    let mut changes = Changes::default();
    let chain = |name: &str| (Table::Nat, name.to_owned(), format!("-A {name} -j ACCEPT\n"));
    changes.chains =
        ["KEELSON-SERVICES", "KEELSON-A-00000000-0", "KEELSON-C-1", "KEELSON-C-2"].map(chain).into();
    changes.jumps = vec![(Table::Nat, "-I PREROUTING 1 -j KEELSON-SERVICES".into())];
    changes.delete_chains = ["KEELSON-C-8", "KEELSON-X-9"].map(|name| (Table::Nat, name.to_owned())).into();
    let whole = changes.rules(6);
    assert_eq!(whole.matches("COMMIT").count(), 1, "{whole}");
    let text = changes.rules(2);
    let sections: Vec<&str> = text.split_inclusive("COMMIT\n").collect();
    assert_eq!(sections.len(), 4, "{text}");
    assert!(sections[0].contains(":KEELSON-C-1 -") && !sections[0].contains("SERVICES"));
    assert!(sections[1].contains("-A KEELSON-SERVICES") && sections[1].contains("-I PREROUTING 1"));
    assert_eq!(sections[2], "*nat\n:KEELSON-C-8 - [0:0]\n:KEELSON-X-9 - [0:0]\nCOMMIT\n");
    assert_eq!(sections[3], "*nat\n-X KEELSON-C-8\n-X KEELSON-X-9\nCOMMIT\n");
    assert_eq!(Changes::default().rules(2), "");
}

#[test]
fn our_jumps_come_first_at_the_start_and_are_left_in_place_later() {
    let wanted = Plan::new(Family::V4, facts()).wanted();
    let with = |rules: &str| {
        let mut found = found(&wanted);
        found.add_rules(Table::Nat, rules);
        found
    };
    let jumps = |found: &Found, ordered| -> Vec<String> {
        wanted.changes(found, ordered).jumps.into_iter().map(|(_, command)| command).collect()
    };
    let mut behind = Found::default();
    behind.add_rules(
        Table::Nat,
        ":PREROUTING ACCEPT [0:0]\n-A PREROUTING -j OTHER\n-A PREROUTING -j KEELSON-SERVICES\n",
    );
    let commands = jumps(&behind, true);
    assert!(
        commands.starts_with(&["-I PREROUTING 1 -j KEELSON-SERVICES".into(), "-D PREROUTING 3".into()]),
        "{commands:?}"
    );
    assert!(!jumps(&behind, false).iter().any(|command| command.contains("PREROUTING")));
    // Twice, and from a chain that no version uses.
    let twice = with(
        "-A POSTROUTING -j KEELSON-OLD\n-A POSTROUTING -j KEELSON-POSTROUTING\n:INPUT ACCEPT [0:0]\n-A INPUT -j KEELSON-OLD\n",
    );
    assert_eq!(jumps(&twice, true), ["-D POSTROUTING 4", "-D POSTROUTING 3", "-D INPUT -j KEELSON-OLD"]);
}

#[test]
fn case_56_one_endpoint_is_one_chain() {
    let mut plan = Plan::new(Family::V4, facts());
    let ports = |number: u8, port| {
        let mut one = service_port(&service(number), "", [10, 96, 0, number].into(), 80);
        one.has_any = true;
        one.cluster = (1..=5).map(|at| Endpoint { ip: [10, 244, number, at].into(), port }).collect();
        one.node_port = 30_000 + u16::from(number);
        vec![one]
    };
    (0..40).for_each(|number| plan.set(&service(number), ports(number, 80)));
    plan.take_wanted();
    plan.set(&service(7), ports(7, 81));
    let changes = plan.take_changes().unwrap();
    assert_eq!((changes.structure(), changes.chains.len()), (1, 1));
    // There and back again.
    plan.set(&service(7), Vec::new());
    plan.set(&service(7), ports(7, 81));
    assert!(plan.take_changes().unwrap().is_empty());
    // Without endpoints: the chain goes, and the leaves of its address and node port lose a rule.
    let mut none = ports(7, 81);
    (none[0].has_any, none[0].cluster) = (false, Vec::new());
    plan.set(&service(7), none);
    let changes = plan.take_changes().unwrap();
    assert_eq!((changes.chains.len(), changes.delete_chains.len(), changes.add_entries.len()), (2, 1, 3));
    let reject = SetName::fixed(Family::V4, SetKind::Reject);
    assert!(changes.add_entries.contains(&(reject, "10.96.0.7,tcp:80".into())));
}
