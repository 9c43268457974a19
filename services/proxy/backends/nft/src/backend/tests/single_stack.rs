//! P10: a node that supports one IP family only.

use std::fs;

use super::*;

/// A Service with a frontend of each family.
fn both(number: u16) -> [Vec<ServicePort>; 2] {
    let [v4, _] = ports(number, 0, 3);
    let endpoint = |index: u16| Endpoint { ip: format!("fd00:10::{index:x}").parse().unwrap(), port: 8080 };
    let v6 = v4.iter().map(|port| ServicePort {
        cluster_ip: format!("fd00:96::{number:x}").parse().unwrap(),
        load_balancer_ips: Vec::new(),
        source_ranges: Vec::new(),
        cluster: (0..3).map(endpoint).collect(),
        ..port.clone()
    });
    let v6 = v6.collect();
    [v4, v6]
}

/// Programs a Service and checks which families are synced.
fn programs(sync_loop: &mut SyncLoop, families: &[Family]) {
    let now = Instant::now();
    sync_loop.set_node(node(), now);
    sync_loop.set(&name(1), both(1), now);
    sync_loop.begin(now);
    let synced: Vec<Family> =
        sync_loop.sync(now).into_iter().map(|synced| synced.result.map(|_| synced.family).unwrap()).collect();
    assert_eq!(synced, families);
    assert!(sync_loop.has_synced());
    assert!(sync_loop.is_current());
    assert!(sync_loop.tick(now + CHECK_INTERVAL).is_empty(), "nothing is retried");
    assert_eq!(differences(sync_loop), [""; 0]);
    let tables = nft(&["list", "tables"]);
    let wanted = families.iter().map(|family| match family {
        Family::V4 => "table ip keelson\n",
        Family::V6 => "table ip6 keelson\n",
    });
    assert_eq!(tables, wanted.collect::<String>());
}

#[test]
fn p10_a_family_that_the_kernel_lacks_is_disabled_and_the_other_programmed() {
    for (faults, lacking, programmed) in [
        ([Fault::None, Fault::Unsupported], Family::V6, Family::V4),
        ([Fault::Unsupported, Fault::None], Family::V4, Family::V6),
        ([Fault::None, Fault::Refused(Errno::EOPNOTSUPP)], Family::V6, Family::V4),
    ] {
        in_namespace(|| {
            let script = Script::default();
            script.next(&faults);
            let (mut sync_loop, _) = open_flaky(&script, options()).unwrap();
            assert!(sync_loop.backend().disabled_reason(lacking).is_some());
            programs(&mut sync_loop, &[programmed]);
        });
    }
}

/// Only missing kernel support disables a family: a missing capability is an error at once.
#[test]
fn p10_no_permission_is_not_a_missing_family() {
    in_namespace(|| {
        let script = Script::default();
        script.next(&[Fault::None, Fault::Refused(Errno::EPERM)]);
        let error = open_flaky(&script, options()).err().unwrap();
        assert!(!error.is_unsupported(), "{error}");
    });
}

#[test]
fn p10_a_node_with_ipv6_disabled_gets_ipv4_alone() {
    in_namespace(|| {
        fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1").unwrap();
        let (mut sync_loop, _) = open_flaky(&Script::default(), options()).unwrap();
        let reason = sync_loop.backend().disabled_reason(Family::V6).unwrap().to_owned();
        assert!(reason.contains("disable_ipv6"), "{reason}");
        programs(&mut sync_loop, &[Family::V4]);
    });
}

/// As in kube-proxy: missing node addresses disable no family that the kernel supports.
#[test]
fn p10_a_node_without_ipv6_addresses_gets_both() {
    in_namespace(|| {
        let (mut sync_loop, _) = open_flaky(&Script::default(), options()).unwrap();
        let mut v4_only = node();
        v4_only.i_ps = Some(IpSet { v4: vec!["192.0.2.1".into()], v6: Vec::new() });
        sync_loop.set_node(v4_only, Instant::now());
        assert!(sync_loop.enabled().any(|family| family == Family::V6));
        programs(&mut sync_loop, &Family::ALL);
    });
}
