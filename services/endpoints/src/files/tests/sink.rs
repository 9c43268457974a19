//! A sink that has lost its state is sent everything again.

use super::*;

#[tokio::test]
async fn a_sink_that_asks_for_a_relist_gets_the_refused_change_with_it() {
    let rig = Rig::new(&[("a.yaml", &documents(&[a(), s()])), ("n.yaml", &node("n1", "z"))]);
    rig.state(&[A, S, ("node n1", "z")]).await;
    for (round, forgotten) in [
        vec![SourceKind::Services],
        vec![SourceKind::EndpointSlices],
        vec![SourceKind::ServiceCidrs],
        vec![SourceKind::Node],
        SourceKind::ALL.to_vec(),
        [SourceKind::ALL, SourceKind::ALL, SourceKind::ALL].concat(),
    ]
    .into_iter()
    .enumerate()
    {
        rig.recorded.get().forgotten = forgotten;
        let (ip, address, zone) = (format!("10.0.1.{round}"), format!("10.1.1.{round}"), format!("z{round}"));
        rig.replace("n.yaml", &node("n1", &zone));
        rig.replace("a.yaml", &documents(&[service("a", &ip), slice("a-1", "a", &address)]));
        rig.state(&[(A.0, &ip), (S.0, &address), ("node n1", &zone)]).await;
    }
}

#[tokio::test]
async fn a_restarted_sink_is_detected_without_changes() {
    let rig = Rig::with(&[("a.yaml", &a())], |parts| {
        parts.timing.poll = Duration::from_millis(50);
        parts.timing.poll_missing = Duration::from_millis(50);
    });
    rig.state(&[A]).await;
    let listed = |recorded: &Recorded| {
        let listing = |event: &&SourceEvent| matches!(event, SourceEvent::Services(seen) if seen.contains(&ObjectEvent::Listing));
        recorded.events.iter().filter(listing).count()
    };
    rig.recorded.get().forgotten = vec![SourceKind::Services];
    rig.until("not listed again", |recorded, _| listed(recorded) == 2).await;
    rig.state(&[A]).await;
    fs::rename(&rig.folder, rig.home().join("away")).unwrap();
    rig.until("it is healthy", |recorded, _| recorded.health.values().any(|h| *h != JobHealth::Healthy))
        .await;
    rig.recorded.get().forgotten = vec![SourceKind::Services];
    rig.until("not listed again", |recorded, _| listed(recorded) == 3).await;
    rig.state(&[A]).await;
}

#[tokio::test]
async fn a_long_listing_comes_in_parts() {
    let many: Vec<String> = (0..1201).map(|n| service(&format!("s{n}"), "10.0.0.1")).collect();
    let rig = Rig::new(&[("many.yaml", &many.join("---\n"))]);
    rig.until("not all", |recorded, _| recorded.states.last().is_some_and(|state| state.len() == 1201)).await;
    let recorded = rig.recorded.get();
    let parts: Vec<usize> = recorded
        .events
        .iter()
        .filter_map(|event| match event {
            SourceEvent::Services(seen) if !seen.is_empty() => Some(seen.len()),
            _ => None,
        })
        .collect();
    assert_eq!(parts, [501, 500, 202]);
}
