//! The published state for given events, without restarts. Numbers of cases are those of the conformance list.

use keelson_actor_system::reports::{EndpointsView, StaleCause};
use keelson_proto::{
    kubernetes::{ObjectMeta, ServiceCidrSpec},
    localnetv1::NodeInfo,
};

use super::testing::{Bench, START_MS, gone, listing, named, put, slice_of, stale_view};
use crate::{
    Ack, EndpointSlice, NodeView, ObjectEvent, Service, ServiceCidr, ServiceName, SourceEvent, SourceKind,
    view::tests::{internal, n1, svc},
};

fn addresses(bench: &Bench, name: &str) -> Vec<String> {
    bench.service(name).endpoints.into_iter().flat_map(|endpoint| endpoint.i_ps.unwrap().v4).collect()
}

fn selected(bench: &Bench, name: &str) -> Vec<String> {
    let endpoints = bench.service(name).endpoints.into_iter();
    let chosen = endpoints.filter(|endpoint| endpoint.conditions.unwrap().selected);
    chosen.flat_map(|endpoint| endpoint.i_ps.unwrap().v4).collect()
}

fn cidr(name: &str, cidr: &str) -> ServiceCidr {
    ServiceCidr {
        metadata: Some(ObjectMeta { name: name.into(), ..ObjectMeta::default() }),
        spec: Some(ServiceCidrSpec { cidrs: vec![cidr.into()] }),
    }
}

fn cidrs(bench: &Bench) -> Vec<String> {
    bench.shown.as_ref().unwrap().node.service_cid_rs.clone()
}

#[test]
fn case_16_nothing_is_published_before_every_kind_is_listed() {
    let mut bench = Bench::new();
    bench.list_slices(&[slice_of("web-1", "web", "L1 R1")]);
    assert_eq!(bench.id(), None, "a slice without its Service");
    bench.node(n1());
    bench.list_cidrs(&[]);
    assert_eq!(bench.id(), None, "Services were not listed");
    assert_eq!(bench.services(vec![ObjectEvent::Listing, put(&named("web"))]), Ack::Accepted);
    assert_eq!(bench.id(), None, "nor wholly");
    assert_eq!(bench.core.next_tick(), None);
    assert_eq!(bench.core.state("", 10).state, "pending");
    assert_eq!(bench.view, stale_view(StaleCause::NotSynced, "the source is not synced yet"));
    bench.services(vec![put(&named("other")), ObjectEvent::ListComplete]);
    assert_eq!((bench.rev(), bench.names()), (1, vec!["ns/other".into(), "ns/web".into()]));
    assert_eq!(addresses(&bench, "ns/web"), ["10.1.0.1", "10.2.0.1"]);
    assert_eq!((bench.stale(), bench.view.clone()), (String::new(), Some(EndpointsView::Synced)));
    assert_eq!(bench.publications, 1, "all at once");
}

#[test]
fn case_16_each_kind_is_waited_for() {
    for last in SourceKind::ALL {
        let mut bench = Bench::new();
        for round in [false, true] {
            for kind in SourceKind::ALL.into_iter().filter(|kind| (*kind == last) == round) {
                assert_eq!(bench.id(), None, "before {last:?}");
                match kind {
                    SourceKind::Services => bench.list_services(&[named("web")]),
                    SourceKind::EndpointSlices => bench.list_slices(&[]),
                    SourceKind::ServiceCidrs => bench.list_cidrs(&[]),
                    SourceKind::Node => bench.node(n1()),
                }
            }
        }
        assert_eq!(bench.rev(), 1, "with {last:?}");
    }
}

#[test]
fn a_cluster_without_services_has_a_first_revision_too() {
    let bench = Bench::synced(&[], &[]);
    assert_eq!((bench.rev(), bench.names()), (1, vec![]));
    assert_eq!(bench.shown.as_ref().map(|shown| shown.node.name.clone()), Some("n1".into()));
}

#[test]
fn case_02_a_service_follows_its_proxy_name_label() {
    let mut bench = Bench::synced(&[named("web"), named("other")], &[slice_of("web-1", "web", "L1")]);
    let labelled = svc().label("service.kubernetes.io/service-proxy-name", "").build();
    bench.pass(100);
    bench.put_service(&labelled);
    assert_eq!((bench.rev(), bench.names()), (2, vec!["ns/other".into()]));
    assert_eq!(bench.changed_since(1), Some((vec!["ns/web".into()], false)));
    bench.pass(100);
    bench.put_service(&named("web"));
    assert_eq!((bench.rev(), addresses(&bench, "ns/web")), (3, vec!["10.1.0.1".into()]));
}

#[test]
fn case_30_a_zone_label_changes_choices_without_any_other_event() {
    let slices = [slice_of("web-1", "web", "R1@a R2@b")];
    let mut bench = Bench::synced(&[named("web"), named("plain")], &slices);
    assert_eq!(selected(&bench, "ns/web"), ["10.2.0.1"]);
    bench.pass(100);
    bench.node(NodeView { zone: Some("b".into()), ..n1() });
    assert_eq!(selected(&bench, "ns/web"), ["10.2.0.2"]);
    assert_eq!(
        bench.changed_since(1),
        Some((vec!["ns/web".into()], true)),
        "the other Service means the same"
    );
}

#[test]
fn changes_of_unused_fields_make_no_revision() {
    let slices = [slice_of("web-1", "web", "L1")];
    let mut bench = Bench::synced(&[named("web")], &slices);
    let (publications, computed) = (bench.publications, bench.computed);
    bench.pass(100);
    let mut touched = named("web");
    let metadata = touched.metadata.get_or_insert_default();
    metadata.resource_version = "77".into();
    metadata.annotations.insert("note".into(), "new".into());
    bench.put_service(&touched);
    bench.put_slice(&slices[0]);
    bench.node(n1());
    bench.services(vec![gone("ns/never")]);
    bench.slices(vec![gone("ns/never")]);
    bench.list_services(&[touched]);
    bench.list_slices(&slices);
    bench.pass(1000);
    assert_eq!((bench.publications, bench.computed, bench.rev()), (publications, computed, 1));
}

#[test]
fn a_change_is_computed_for_its_service_only() {
    let services: Vec<Service> = (0..100).map(|number| named(&format!("s{number}"))).collect();
    let mut bench = Bench::synced(&services, &[]);
    assert_eq!(bench.computed, 100);
    bench.pass(100);
    bench.put_slice(&slice_of("s7-1", "s7", "L1"));
    assert_eq!((bench.computed, bench.rev()), (101, 2));
    assert_eq!(bench.changed_since(1), Some((vec!["ns/s7".into()], false)));
    bench.pass(100);
    bench.node(NodeView { ips: vec!["192.0.2.1".parse().unwrap()], ..n1() });
    assert_eq!((bench.computed, bench.rev()), (101, 3), "fields that are only published");
    assert_eq!(bench.changed_since(2), Some((vec![], true)));
}

/// P4: facts of the node that are temporarily missing keep their last values.
#[test]
fn p4_a_node_that_is_deleted_or_has_no_addresses_keeps_its_last_facts() {
    let full = NodeView {
        exists: true,
        zone: Some("a".into()),
        ips: vec!["192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap()],
        pod_cidrs: vec!["10.244.1.0/24".into()],
        eligible: true,
        ..n1()
    };
    let gone = NodeView { name: full.name.clone(), ..NodeView::default() };
    let mut bench = Bench::synced(&[named("a")], &[slice_of("a-1", "a", "L1")]);
    bench.node(full.clone());
    bench.pass(100);
    let node = |bench: &Bench| (*bench.shown.as_ref().unwrap().node).clone();
    let before = node(&bench);
    let report = |bench: &mut Bench, node: &NodeView| {
        bench.node(node.clone());
        bench.pass(100);
    };
    let computed = bench.computed;
    // Without addresses, nothing changes.
    let rev = bench.rev();
    report(&mut bench, &NodeView { ips: Vec::new(), ..full.clone() });
    assert_eq!(bench.rev(), rev);
    // Being deleted, then deleted: the last known facts are kept.
    report(&mut bench, &NodeView { eligible: false, ..full.clone() });
    report(&mut bench, &gone);
    assert_eq!(node(&bench), NodeInfo { exists: false, eligible: false, ..before.clone() });
    report(&mut bench, &full);
    report(&mut bench, &gone);
    assert_eq!(node(&bench), NodeInfo { exists: false, ..before.clone() });
    assert_eq!(bench.computed, computed, "no Service depends on any of it");
    // Also after a restart without a Node.
    bench.restart();
    report(&mut bench, &gone);
    bench.list_all(&[named("a")], &[slice_of("a-1", "a", "L1")]);
    assert_eq!(node(&bench), NodeInfo { exists: false, ..before });
    // Facts that the Node has replace the old ones: another address, no zone.
    report(&mut bench, &NodeView { zone: None, ips: vec!["192.0.2.2".parse().unwrap()], ..full });
    let after = node(&bench);
    assert_eq!((after.zone.as_str(), after.i_ps.unwrap().v4), ("", vec!["192.0.2.2".to_owned()]));
}

#[test]
fn service_cidrs_are_part_of_the_node() {
    let mut bench = Bench::idle(&[], &[]);
    bench.list_cidrs(&[cidr("b", "10.97.0.0/16"), cidr("a", "10.96.0.0/16")]);
    assert_eq!((bench.rev(), cidrs(&bench)), (2, vec!["10.96.0.0/16".into(), "10.97.0.0/16".into()]));
    bench.pass(100);
    bench.list_cidrs(&[cidr("a", "10.96.0.0/16")]);
    assert_eq!((bench.rev(), cidrs(&bench)), (3, vec!["10.96.0.0/16".into()]));
    bench.pass(100);
    bench.send_event(SourceEvent::ServiceCidrs(vec![ObjectEvent::Deleted(ServiceName::new("", "a"))]));
    assert_eq!((bench.rev(), cidrs(&bench)), (4, vec![]));
}

#[test]
fn events_before_a_list_are_answered_with_relist() {
    let mut bench = Bench::new();
    for seen in [vec![], vec![put(&named("web"))], vec![gone("ns/web")], vec![ObjectEvent::ListComplete]] {
        assert_eq!(bench.services(seen), Ack::Relist);
    }
    assert_eq!(bench.slices(vec![put(&slice_of("a", "web", "L1")), ObjectEvent::Listing]), Ack::Relist);
    assert_eq!(bench.services(vec![ObjectEvent::Listing]), Ack::Accepted);
    assert_eq!(bench.services(vec![]), Ack::Accepted);
}

#[test]
fn a_complete_list_removes_objects_missing_from_it() {
    let slices = [slice_of("a-1", "a", "L1"), slice_of("b-1", "b", "L2"), slice_of("b-2", "b", "R2")];
    let mut bench = Bench::idle(&[named("a"), named("b"), named("c")], &slices);
    bench.services(vec![ObjectEvent::Listing, put(&named("b"))]);
    bench.slices(vec![ObjectEvent::Listing, put(&slices[2])]);
    bench.pass(1000);
    assert_eq!(bench.rev(), 1, "not before the end");
    bench.services(vec![ObjectEvent::ListComplete]);
    bench.pass(1000);
    assert_eq!(bench.rev(), 1, "nor before the end of the other");
    bench.slices(vec![ObjectEvent::ListComplete]);
    assert_eq!(
        (bench.rev(), bench.names(), addresses(&bench, "ns/b")),
        (2, vec!["ns/b".into()], vec!["10.2.0.2".into()])
    );
    let state = bench.core.state("", 0);
    let objects: Vec<u64> = state.sources.iter().map(|source| source.objects).collect();
    assert_eq!((objects, state.services, state.endpoints), (vec![1, 1, 0, 1], 1, 1));
}

#[test]
fn events_of_other_kinds_during_a_list_are_published_with_it() {
    let mut bench = Bench::idle(&[named("a")], &[]);
    bench.services(vec![ObjectEvent::Listing]);
    bench.put_slice(&slice_of("a-1", "a", "L1"));
    bench.node(NodeView { zone: Some("b".into()), ..n1() });
    bench.services(vec![put(&named("a")), put(&named("gone"))]);
    // The source lists again.
    bench.services(vec![ObjectEvent::Listing, put(&named("a")), gone("ns/a"), put(&named("b"))]);
    bench.pass(1000);
    assert_eq!(bench.rev(), 1);
    bench.services(vec![put(&named("a")), ObjectEvent::ListComplete]);
    assert_eq!((bench.rev(), bench.names()), (2, vec!["ns/a".into(), "ns/b".into()]));
    assert_eq!(addresses(&bench, "ns/a"), ["10.1.0.1"]);
}

#[test]
fn a_slice_that_changes_its_service_leaves_the_former() {
    let mut bench =
        Bench::idle(&[named("a"), named("b")], &[slice_of("s", "a", "L1"), slice_of("t", "b", "R1")]);
    bench.put_slice(&slice_of("s", "b", "L1"));
    assert_eq!((addresses(&bench, "ns/a"), addresses(&bench, "ns/b").len()), (vec![], 2));
    assert_eq!(bench.changed_since(1), Some((vec!["ns/a".into(), "ns/b".into()], false)));
    bench.pass(100);
    bench.slices(vec![gone("ns/s")]);
    assert_eq!(addresses(&bench, "ns/b"), ["10.2.0.1"]);
    bench.pass(100);
    let mut homeless = slice_of("t", "b", "R1");
    homeless.metadata.get_or_insert_default().labels.clear();
    bench.put_slice(&homeless);
    assert_eq!(addresses(&bench, "ns/b"), Vec::<String>::new());
}

#[test]
fn slices_outlive_their_service_and_come_before_it() {
    let mut bench = Bench::idle(&[named("a")], &[slice_of("a-1", "a", "L1")]);
    bench.services(vec![gone("ns/a")]);
    assert_eq!(bench.names(), Vec::<String>::new());
    assert!(bench.core.explain(&ServiceName::new("ns", "a")).is_some_and(|why| !why.served && why.rev == 0));
    bench.pass(100);
    bench.slices(vec![put(&slice_of("a-2", "a", "R1"))]);
    assert_eq!(bench.rev(), 2);
    bench.pass(100);
    bench.put_service(&named("a"));
    assert_eq!((bench.rev(), addresses(&bench, "ns/a").len()), (3, 2));
    bench.slices(vec![gone("ns/a-1"), gone("ns/a-2")]);
    bench.services(vec![gone("ns/a")]);
    bench.pass(100);
    assert_eq!(bench.core.explain(&ServiceName::new("ns", "a")), None, "nothing is kept of it");
}

#[test]
fn e19_first_changes_are_published_at_once_and_further_ones_every_interval() {
    let mut bench = Bench::idle(&[], &[]);
    let publications = bench.publications;
    for number in 0..50 {
        bench.put_service(&named(&format!("s{number}")));
        if number == 0 {
            assert_eq!(bench.rev(), 2, "at once");
        }
        bench.pass(1);
    }
    assert_eq!(bench.publications - publications, 11, "one and ten more");
    bench.pass(100);
    assert_eq!((bench.publications - publications, bench.names().len()), (12, 50), "all others together");
    bench.pass(2_000);
    bench.put_service(&named("late"));
    assert_eq!(bench.rev(), 14, "at once again");
}

#[test]
fn changes_gather_while_the_disk_is_slow() {
    let mut bench = Bench::idle(&[], &[]);
    bench.slow = true;
    bench.put_service(&named("a"));
    assert_eq!((bench.rev(), bench.writes.len()), (1, 1), "not seen before it is on disk");
    bench.put_service(&named("b"));
    bench.services(vec![gone("ns/b"), put(&named("c"))]);
    bench.pass(1000);
    let limit = std::time::Duration::from_millis(100) + bench.policy.write_timeout;
    assert_eq!((bench.rev(), bench.core.next_tick()), (1, Some(limit)));
    bench.write();
    assert_eq!((bench.rev(), bench.names()), (2, vec!["ns/a".into()]));
    bench.write();
    assert_eq!((bench.rev(), bench.names()), (3, vec!["ns/a".into(), "ns/c".into()]));
}

#[test]
fn an_object_created_and_deleted_between_revisions_is_not_published() {
    let mut bench = Bench::idle(&[named("a")], &[]);
    bench.slow = true;
    bench.put_service(&named("b"));
    bench.services(vec![gone("ns/a")]);
    bench.put_service(&named("a"));
    bench.write();
    bench.pass(1000);
    assert_eq!((bench.rev(), bench.writes.len()), (2, 0));
}

/// P19: without permission to list `servicecidrs`, endpoints stay current.
#[test]
fn p19_service_cidrs_that_cannot_be_listed_make_nothing_stale() {
    let mut bench = Bench::synced(&[named("a")], &[]);
    bench.health(SourceKind::ServiceCidrs, Some("403"));
    assert_eq!((bench.stale(), bench.view.clone()), (String::new(), Some(EndpointsView::Synced)));
    bench.put_service(&named("b"));
    bench.write();
    bench.pass(1000);
    assert_eq!((bench.rev(), bench.stale()), (2, String::new()));
    let state = bench.core.state("", 0);
    let source = state.sources.iter().find(|source| source.resource == "servicecidrs").unwrap();
    assert_eq!((&*source.health, &*source.reason), ("failing", "403"));
    bench.health(SourceKind::Services, Some("also refused"));
    assert_eq!(bench.stale(), "services: also refused");
}

/// An API server that starts rejects requests for a moment, until it has read its roles.
#[test]
fn p19_refused_service_cidrs_keep_the_restored_ones() {
    let listed = [cidr("kubernetes", "10.96.0.0/16")];
    let refused = || SourceEvent::ServiceCidrs(vec![ObjectEvent::Listing, ObjectEvent::Refused]);
    let mut bench = Bench::new();
    bench.send_event(refused());
    bench.tell_all(&[named("a")], &[]);
    assert_eq!(cidrs(&bench), Vec::<String>::new());
    bench.pass(100);
    bench.list_cidrs(&listed);
    let known = (bench.rev(), cidrs(&bench));
    assert_eq!(known.1, ["10.96.0.0/16"]);

    bench.restart();
    bench.node(n1());
    bench.send_event(refused());
    bench.list_services(&[named("a")]);
    bench.list_slices(&[]);
    bench.pass(100);
    assert_eq!((bench.rev(), cidrs(&bench), bench.stale()), (known.0, known.1.clone(), String::new()));
    bench.list_cidrs(&listed);
    bench.pass(100);
    assert_eq!((bench.rev(), cidrs(&bench)), known, "no revision for what was known");
    bench.list_cidrs(&[]);
    bench.pass(100);
    assert_eq!((bench.rev(), cidrs(&bench)), (known.0 + 1, vec![]), "it is not recalled once it was listed");
}

#[test]
fn a_failing_watch_makes_the_state_stale_until_its_objects_are_published() {
    let mut bench = Bench::idle(&[named("a")], &[]);
    bench.health(SourceKind::EndpointSlices, Some("connection refused"));
    bench.pass(100);
    bench.health(SourceKind::Services, Some("also refused"));
    assert_eq!((bench.rev(), bench.stale()), (1, "endpointslices: connection refused".into()));
    assert_eq!(bench.view, stale_view(StaleCause::SourceUnavailable, &bench.stale()));
    let state = bench.core.state("", 0);
    assert_eq!((&*state.state, state.since_unix_ms), ("stale", START_MS + 100));
    bench.health(SourceKind::EndpointSlices, None);
    assert_eq!(bench.stale(), "services: also refused");
    bench.services(vec![ObjectEvent::Listing]);
    bench.health(SourceKind::Services, None);
    assert_eq!(bench.stale(), "services: also refused", "it is not known yet what it missed");
    bench.services(vec![put(&named("b")), ObjectEvent::ListComplete]);
    assert_eq!((bench.rev(), bench.stale(), bench.names()), (2, String::new(), vec!["ns/b".into()]));
    assert_eq!(bench.view, Some(EndpointsView::Synced));
}

#[test]
fn the_error_of_a_failing_watch_explains_why_no_state_is_served() {
    let mut bench = Bench::new();
    bench.health(SourceKind::Services, Some("403 Forbidden"));
    assert_eq!(bench.view, stale_view(StaleCause::SourceRefused, "services: 403 Forbidden"));
    let state = bench.core.state("", 0);
    assert_eq!(
        (&*state.state, &*state.reason, state.since_unix_ms),
        ("pending", "services: 403 Forbidden", START_MS)
    );
    assert_eq!((&*state.sources[0].health, &*state.sources[1].health), ("failing", "pending"));
}

#[test]
fn a_revision_has_the_time_of_its_oldest_change_since_the_start() {
    let at = |slice: EndpointSlice, millis: i64| {
        let mut slice = slice;
        let time = jiff::Timestamp::from_millisecond(START_MS + millis).unwrap().to_string();
        let annotations = &mut slice.metadata.get_or_insert_default().annotations;
        annotations.insert("endpoints.kubernetes.io/last-change-trigger-time".into(), time);
        slice
    };
    let triggered = |bench: &Bench| bench.shown.as_ref().unwrap().triggered_unix_ms;
    let first = at(slice_of("a-1", "a", "L1"), -5000);
    let mut bench = Bench::synced(&[named("a"), named("b")], &[first]);
    assert_eq!(triggered(&bench), None, "made before the start");
    bench.pass(1000);
    bench.slices(vec![
        put(&at(slice_of("a-1", "a", "L1 L2"), 700)),
        put(&at(slice_of("b-1", "b", "R1"), 500)),
        put(&at(slice_of("nobody-1", "nobody", "R1"), 100)),
        put(&at(slice_of("b-1", "b", "R1 R2"), 900)),
    ]);
    assert_eq!((triggered(&bench), bench.rev()), (Some(START_MS + 500), 2), "of what readers see");
    bench.pass(1000);
    bench.put_service(&internal().named("ns", "c").port("http", "TCP", 80).build());
    assert_eq!(triggered(&bench), None);
    assert_eq!(bench.delays, [None, Some(500), None]);
}

#[test]
fn inspection_shows_the_state_and_the_requested_services() {
    let services = [named("b"), svc().named("a-b", "x").build(), svc().named("a", "y").build(), named("a")];
    let bench = Bench::idle(&services, &[slice_of("a-1", "a", "L1 R1! R2~")]);
    let state = bench.core.state("", 2);
    assert_eq!((&*state.state, state.rev, state.durable), ("synced", 1, true));
    assert_eq!((state.services, state.endpoints, state.published_unix_ms), (4, 2, START_MS));
    assert_eq!(state.instance_id, bench.id().unwrap().0.to_string());
    assert_eq!(state.node.map(|node| (node.name, node.zone)), Some(("n1".into(), "a".into())));
    assert!(state.sources.iter().all(|source| source.synced));
    let names = |list: &[keelson_proto::endpoints::ServiceSummary]| -> Vec<String> {
        list.iter().map(|service| format!("{}/{}", service.namespace, service.name)).collect()
    };
    assert_eq!(names(&state.list), ["a-b/x", "a/y"]);
    assert_eq!(names(&bench.core.state("ns", 10).list), ["ns/a", "ns/b"]);
    assert_eq!(names(&bench.core.state("a", 10).list), ["a/y"]);
    assert_eq!(names(&bench.core.state("zz", 10).list), Vec::<String>::new());
    let list = bench.core.state("ns", 1).list;
    assert_eq!(
        (&*list[0].r#type, &list[0].ports[..]),
        ("LoadBalancer", &["http 80:30080/TCP".to_owned()][..])
    );
    assert_eq!((list[0].ready, list[0].local_ready, list[0].selected, list[0].rev), (1, 1, 1, 1));
    let why = bench.core.explain(&ServiceName::new("ns", "a")).unwrap();
    assert_eq!((why.served, why.rev, why.slices.len()), (true, 1, 1));
    assert_eq!(bench.core.explain(&ServiceName::new("ns", "none")), None);
    let inspected = bench.core.inspect(&bench.core.state("", 0));
    assert_eq!((&inspected["rev"], &inspected["on_disk"]), (&1.into(), &"the same".into()));
    assert_eq!(bench.core.summary(), "4 services at revision 1, synced");
}

#[test]
fn objects_without_a_usable_name_are_left_out() {
    let long = svc().named("ns", &"x".repeat(2000)).build();
    let nameless = Service { metadata: None, ..named("a") };
    let mut bench = Bench::synced(&[nameless, long, svc().named("ns", "").build()], &[]);
    assert_eq!(bench.names(), Vec::<String>::new());
    bench.slices(vec![put(&EndpointSlice::default())]);
    bench.pass(100);
    assert_eq!((bench.rev(), bench.core.state("", 0).sources[1].objects), (1, 0));
}

#[test]
fn a_large_cluster_is_listed_at_once_within_a_memory_bound() {
    let services: Vec<Service> = (0..300).map(|number| named(&format!("service-{number}"))).collect();
    let words: Vec<String> = (1..=10).map(|number| format!("R{number}")).collect();
    let slices: Vec<EndpointSlice> = (0..300)
        .map(|number| {
            slice_of(&format!("service-{number}-abcde"), &format!("service-{number}"), &words.join(" "))
        })
        .collect();
    let mut bench = Bench::new();
    bench.node(n1());
    bench.list_cidrs(&[]);
    assert_eq!(bench.slices(listing(&slices)), Ack::Accepted);
    assert_eq!(bench.services(listing(&services)), Ack::Accepted);
    let state = bench.core.state("", 0);
    assert_eq!((state.services, state.endpoints, bench.publications), (300, 3000, 1));
    let bytes = bench.core.inspect(&state)["input_bytes"].as_u64().unwrap();
    assert!(bytes / 300 < 1000, "{} bytes a Service with 10 endpoints", bytes / 300);
    assert_eq!(
        bench.core.next_tick(),
        Some(std::time::Duration::from_secs(300)),
        "nothing but the next stamp"
    );
}
