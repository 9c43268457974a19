//! Frontends: cases 1 to 5, 14 to 17, 43 and 44.

use crate::common::{Case, Setup, run, shared};
use crate::expect::{
    Want, kept, masked, unused_cluster_ip, unused_external_port, unused_udp_port, used_before,
};
use crate::objects::{PORT, at_8080, elsewhere, on_node, port};
use crate::subject::transports;
use anyhow::{Result, ensure};
use keelson_cluster::endpoints::Kind;
use keelson_cluster::kube::{ApiFault, ApiMatch};
use keelson_cluster::net::plan::NODE;
use keelson_cluster::net::{Family, Transport};
use serde_json::json;
use std::time::Duration;

#[test]
fn case_01_headless_external_name_and_no_cluster_ip_have_no_frontend() -> Result<()> {
    Case::run(1, Setup::Plain, async |case| {
        let spec = |n: u8, over: serde_json::Value| {
            let x = case.x_address(n);
            let mut spec = json!({"externalIPs": [x.v4, x.v6]});
            if let (Some(spec), Some(over)) = (spec.as_object_mut(), over.as_object()) {
                spec.extend(over.clone());
            }
            spec
        };
        let headless = json!({"clusterIP": "None", "clusterIPs": ["None"], "type": "NodePort"});
        let named = json!({"type": "ExternalName", "externalName": "example.com"});
        let plural = json!({"clusterIP": "", "type": "NodePort"});
        for (n, name, over) in [(1, "headless", headless), (2, "named", named), (3, "plural", plural)] {
            let mut service = case.service(name, n, &spec(n, over));
            let w = case.w_address(n);
            service["status"] = json!({"loadBalancer": {"ingress": [{"ip": w.v4}, {"ip": w.v6}]}});
            case.put_unchecked(Kind::Service, &service).await?;
            case.slices(name, &[elsewhere(1)]).await?;
        }
        case.synced().await?;
        let mut table = Vec::new();
        for n in 1..=3 {
            table.push((case.client(), case.x(n), Want::Untouched));
            table.push((case.pod(), case.w(n), Want::Untouched));
            table.push((case.client(), case.np(n), Want::Reset));
            table.push((case.pod(), case.v(n), unused_cluster_ip()));
        }
        case.all(table).await
    })
}

#[test]
fn case_02_a_service_of_another_proxy_has_no_frontends() -> Result<()> {
    Case::run(2, Setup::Plain, async |case| {
        let r1 = [elsewhere(1)];
        case.make_with("svc", 1, &json!({}), &r1).await?;
        let there = [
            (case.pod(), case.v(1), kept(&r1)),
            (case.client(), case.w(1), masked(&r1)),
            (case.client(), case.np(1), masked(&r1)),
        ];
        let gone = [
            (case.pod(), case.v(1), used_before(unused_cluster_ip())),
            (case.client(), case.w(1), used_before(Want::Untouched)),
            (case.client(), case.np(1), used_before(Want::Reset)),
        ];
        case.synced().await?;
        case.all(there.clone()).await?;
        let labelled =
            |value| json!({"metadata": {"labels": {"service.kubernetes.io/service-proxy-name": value}}});
        case.writer.patch(Kind::Service, "svc", &labelled(json!(""))).await?;
        case.synced().await?;
        case.all(gone).await?;
        case.writer.patch(Kind::Service, "svc", &labelled(json!(null))).await?;
        case.synced().await?;
        case.all(there).await
    })
}

#[test]
fn case_03_a_family_without_endpoints_is_rejected() -> Result<()> {
    Case::run(3, Setup::Plain, async |case| {
        case.make("svc", 1, &json!({})).await?;
        let r1 = [elsewhere(1)];
        case.put(Kind::Slice, &case.slice("svc", "a", Family::V4, &at_8080(), &r1)).await?;
        case.synced().await?;
        case.all([(case.pod(), case.v(1).v4(), kept(&r1)), (case.pod(), case.v(1).v6(), Want::Reject)]).await
    })
}

#[test]
fn case_04_a_service_of_one_family_has_no_frontend_of_the_other() -> Result<()> {
    Case::run(4, Setup::Plain, async |case| {
        let (v, x, w) = (case.v_address(1), case.x_address(1), case.w_address(1));
        let single = json!({
            "clusterIPs": [v.v4], "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack", "externalIPs": [x.v6],
        });
        case.make("svc", 1, &single).await?;
        case.ingress("svc", &[json!({"ip": w.v6})]).await?;
        let r1 = [elsewhere(1)];
        case.slices("svc", &r1).await?;
        case.synced().await?;
        case.all([
            (case.pod(), case.v(1).v4(), kept(&r1)),
            (case.client(), case.np(1).v4(), masked(&r1)),
            (case.client(), case.x(1).v6(), Want::Untouched),
            (case.client(), case.w(1).v6(), Want::Untouched),
            (case.client(), case.w(1).v4(), Want::Untouched),
            (case.client(), case.np(1).v6(), Want::Reset),
        ])
        .await
    })
}

#[test]
fn case_05_slices_of_names_or_no_service_are_ignored() -> Result<()> {
    Case::run(5, Setup::Plain, async |case| {
        case.make("named", 1, &json!({})).await?;
        let mut named = case.slice("named", "a", Family::V4, &at_8080(), &[elsewhere(1)]);
        named["addressType"] = json!("FQDN");
        named["endpoints"][0]["addresses"] = json!(["example.com"]);
        case.put(Kind::Slice, &named).await?;
        case.make("alone", 2, &json!({})).await?;
        let mut alone = case.slice("alone", "a", Family::V4, &at_8080(), &[elsewhere(1)]);
        alone["metadata"]["labels"] = json!({});
        case.put(Kind::Slice, &alone).await?;
        case.synced().await?;
        case.all([(case.pod(), case.v(1), Want::Reject), (case.pod(), case.v(2), Want::Reject)]).await
    })
}

#[test]
fn case_14_protocols_on_one_port_are_independent() -> Result<()> {
    Case::run(14, Setup::Plain, async |case| {
        let mut names = vec![("t", Transport::Tcp), ("u", Transport::Udp), ("s", Transport::Sctp)];
        names.retain(|(_, transport)| transports().contains(transport));
        let ports: Vec<_> = names
            .iter()
            .map(|(name, transport)| {
                let mut port = port(name, PORT, *transport);
                port["nodePort"] = json!(case.node_port(1));
                port
            })
            .collect();
        case.make("svc", 1, &json!({"ports": ports})).await?;
        let endpoints = [on_node(&case, 1), elsewhere(1), on_node(&case, 2)];
        for ((name, transport), endpoint) in names.iter().zip(&endpoints) {
            let ports = [port(name, 8080, *transport)];
            case.slices_of("svc", name, &ports, std::slice::from_ref(endpoint)).await?;
        }
        case.synced().await?;
        let mut table = Vec::new();
        for ((_, transport), endpoint) in names.iter().zip(&endpoints) {
            let [v, w, np] = [case.v(1), case.w(1), case.np(1)].map(|target| target.over(*transport));
            table.push((case.pod(), v, kept([endpoint])));
            table.push((case.client(), v, masked([endpoint])));
            table.push((case.client(), w, masked([endpoint])));
            table.push((case.client(), np, masked([endpoint])));
            table.push((case.host(), w, masked([endpoint])));
        }
        case.all(table).await?;

        let without: Vec<_> = ports.into_iter().filter(|port| port["name"] != "u").collect();
        case.respec("svc", &json!({"ports": without})).await?;
        case.synced().await?;
        let mut table = vec![
            (case.pod(), case.v(1).over(Transport::Udp), unused_udp_port()),
            (case.pod(), case.v(1), kept([&endpoints[0]])),
            (case.client(), case.w(1).over(Transport::Udp), unused_external_port(Want::Drop)),
        ];
        if transports().contains(&Transport::Sctp) {
            table.push((case.pod(), case.v(1).over(Transport::Sctp), kept([&endpoints[2]])));
            table.push((case.client(), case.w(1).over(Transport::Sctp), masked([&endpoints[2]])));
        }
        case.all(table).await
    })
}

#[test]
fn case_15_addresses_with_leading_zeros_are_decimal() -> Result<()> {
    Case::run(15, Setup::Plain, async |case| {
        let odd = json!({
            "type": "ClusterIP", "clusterIP": "10.100.015.041", "clusterIPs": ["10.100.015.041"],
            "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack",
        });
        let service = case.service("svc", 41, &odd);
        case.refused(Kind::Service, &service).await?;
        case.put_unchecked(Kind::Service, &service).await?;
        let r1 = [elsewhere(1)];
        let mut slice = case.slice("svc", "a", Family::V4, &at_8080(), &r1);
        slice["endpoints"][0]["addresses"] = json!(["10.244.002.011"]);
        case.put_unchecked(Kind::Slice, &slice).await?;
        case.synced().await?;
        case.all([(case.pod(), case.v(41).v4(), kept(&r1))]).await
    })
}

#[test]
fn case_16_a_slice_may_come_before_its_service() -> Result<()> {
    Case::run(16, Setup::Plain, async |case| {
        let r1 = [elsewhere(1)];
        case.slices("svc", &r1).await?;
        case.synced().await?;
        case.all([(case.pod(), case.v(1), unused_cluster_ip()), (case.client(), case.w(1), Want::Untouched)])
            .await?;
        case.make("svc", 1, &json!({})).await?;
        case.synced().await?;
        case.all([(case.pod(), case.v(1), kept(&r1)), (case.client(), case.w(1), masked(&r1))]).await
    })
}

/// A proxy starts that cannot list one kind for a while, and must not program the other.
async fn check_nothing_programmed(number: u8, held: &str) -> Result<()> {
    // Its objects exist before the proxy starts.
    let before = Case::new(number, Setup::Plain).await?;
    before.make("svc", 1, &json!({})).await?;
    let r1 = [elsewhere(1)];
    before.slices("svc", &r1).await?;
    before.synced().await?;
    drop(before);
    let proxy = shared().await?.cluster.proxy().await?;
    let rule = proxy.rule(ApiMatch::path(held), ApiFault::Hold);
    let case = Case::starting(number, &proxy).await?;
    case.eventually(&format!("{held} is asked for"), || async {
        ensure!(proxy.hits(rule) > 0, "it is not");
        Ok(())
    })
    .await?;
    // A proxy that does not wait programs rules within this time.
    tokio::time::sleep(Duration::from_secs(2)).await;
    case.all([
        (case.pod(), case.v(1), Want::Untouched),
        (case.client(), case.w(1), Want::Untouched),
        (case.client(), case.np(1), Want::Reset),
    ])
    .await?;
    proxy.remove(rule);
    case.eventually_all(vec![
        (case.pod(), case.v(1), kept(&r1)),
        (case.client(), case.w(1), masked(&r1)),
        (case.client(), case.np(1), masked(&r1)),
    ])
    .await
}

#[test]
fn case_16_services_without_listed_slices_program_nothing() -> Result<()> {
    run(check_nothing_programmed(116, "/endpointslices"))
}

#[test]
fn case_16_slices_without_listed_services_program_nothing() -> Result<()> {
    run(check_nothing_programmed(117, "/api/v1/services"))
}

#[test]
fn case_17_undefined_ports_and_unallocated_addresses() -> Result<()> {
    Case::run(17, Setup::Plain, async |case| {
        case.make("one", 1, &json!({})).await?;
        case.make("two", 2, &json!({"type": "ClusterIP", "ports": [port("http", 81, Transport::Tcp)]}))
            .await?;
        case.slices("one", &[elsewhere(1)]).await?;
        case.slices("two", &[elsewhere(2)]).await?;
        case.synced().await?;
        case.all([
            (case.pod(), case.v(2).port(81), kept([&elsewhere(2)])),
            (case.pod(), case.v(1).port(81), Want::Reject),
            (case.host(), case.v(1).port(81), Want::Reject),
            (case.client(), case.v(1).port(81), Want::Reject),
            (case.pod(), case.v(1).over(Transport::Udp), Want::Reject),
            (case.pod(), case.v(77), unused_cluster_ip()),
            (case.host(), case.v(77), unused_cluster_ip()),
            (case.client(), case.v(77), unused_cluster_ip()),
            (case.client(), case.w(1).port(81), unused_external_port(Want::Untouched)),
            (case.host(), case.w(1).port(81), unused_external_port(Want::Untouched)),
        ])
        .await
    })
}

#[test]
fn case_43_only_addresses_of_mode_vip_are_captured() -> Result<()> {
    Case::run(43, Setup::Plain, async |case| {
        let r1 = [elsewhere(1)];
        for (n, name) in [(1, "proxied"), (2, "vip"), (3, "absent")] {
            case.make(name, n, &json!({})).await?;
            case.slices(name, &r1).await?;
        }
        let of = |n: u8, mode: &str| {
            let w = case.w_address(n);
            [json!({"ip": w.v4, "ipMode": mode}), json!({"ip": w.v6, "ipMode": mode})]
        };
        case.ingress("proxied", &of(1, "Proxy")).await?;
        case.ingress("vip", &of(2, "VIP")).await?;
        case.ingress("absent", &[]).await?;
        case.synced().await?;
        case.all([
            (case.client(), case.w(1), Want::Untouched),
            (case.pod(), case.w(1), Want::Untouched),
            (case.client(), case.w(2), masked(&r1)),
            (case.client(), case.w(3), Want::Untouched),
            (case.pod(), case.v(3), kept(&r1)),
            (case.client(), case.np(3), masked(&r1)),
        ])
        .await
    })
}

#[test]
fn case_44_without_a_node_port_there_is_none_and_the_load_balancer_works() -> Result<()> {
    Case::run(44, Setup::Plain, async |case| {
        let without = json!({
            "allocateLoadBalancerNodePorts": false, "ports": [port("http", PORT, Transport::Tcp)],
        });
        let r1 = [elsewhere(1)];
        case.serve("svc", 1, &without, &r1).await?;
        let own = crate::expect::Target::new(NODE, PORT);
        case.all([(case.client(), case.w(1), masked(&r1)), (case.client(), own, Want::Reset)]).await
    })
}
