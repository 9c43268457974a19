//! Changes in the folder are sent once, complete, and atomically.

use std::{fs::OpenOptions, io::Write as _, os::unix::fs::symlink};

use super::*;

#[tokio::test]
async fn the_folder_is_listed_and_then_only_changes_are_sent() {
    let rig = Rig::new(&[("a.yaml", &a()), ("b.yaml", &b())]);
    rig.state(&[A, B]).await;
    rig.is_healthy().await;
    rig.recorded.get().events.clear();
    rig.replace("a.yaml", &a2());
    rig.state(&[A2, B]).await;
    let recorded = rig.recorded.get();
    let services: Vec<_> = recorded
        .events
        .iter()
        .filter_map(|event| match event {
            SourceEvent::Services(seen) if !seen.is_empty() => Some(&seen[..]),
            _ => None,
        })
        .collect();
    assert!(matches!(services[..], [[ObjectEvent::Upsert(_)]]), "{services:?}");
    assert_eq!(recorded.states.len(), 2);
}

#[tokio::test]
async fn files_that_appear_and_go_are_noticed() {
    let rig = Rig::new(&[]);
    rig.state(&[]).await;
    rig.write("a.yaml", &a());
    rig.state(&[A]).await;
    rig.write(
        "b.json",
        r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"b"},"spec":{"clusterIP":"10.0.0.9"}}"#,
    );
    rig.state(&[A, B]).await;
    rig.remove("a.yaml");
    rig.state(&[B]).await;
    rig.write("b.json", "");
    rig.state(&[]).await;
}

#[tokio::test]
async fn a_renamed_file_changes_nothing() {
    let rig = Rig::new(&[("m.yaml", &a())]);
    rig.state(&[A]).await;
    for (from, to) in [("m.yaml", "z.yaml"), ("z.yaml", "c.yml")] {
        fs::rename(rig.folder.join(from), rig.folder.join(to)).unwrap();
        rig.write("mark.yaml", &service(&to[..1], "10.0.0.7"));
        let mark = format!("service default/{}", &to[..1]);
        rig.state(&[A, (&mark, "10.0.0.7")]).await;
    }
    rig.remove("c.yml");
    rig.until("it is still there", |recorded, _| !recorded.states.last().unwrap().contains_key(A.0)).await;
    let recorded = rig.recorded.get();
    let gone = recorded.states.iter().position(|state| !state.contains_key(A.0)).unwrap();
    assert_eq!(gone, recorded.states.len() - 1, "{:#?}", recorded.states);
}

#[tokio::test]
async fn an_editor_that_renames_the_old_file_causes_only_its_changes() {
    // It is not dropped while it is away: this is longer than any wait here.
    let settle = |parts: &mut FilesParts| parts.timing.settle = TEST_TIMEOUT;
    let rig = Rig::with(&[("a.yaml", &documents(&[a(), b()]))], settle);
    rig.state(&[A, B]).await;
    fs::rename(rig.folder.join("a.yaml"), rig.folder.join("a.yaml~")).unwrap();
    rig.write("a.yaml", &documents(&[a2(), b()]));
    rig.remove("a.yaml~");
    rig.state(&[A2, B]).await;
    assert_eq!(rig.recorded.get().states, [state(&[A, B]), state(&[A2, B])]);
}

#[tokio::test]
async fn services_slices_and_the_node_of_one_rename_are_one_state() {
    let old = documents(&[a(), s(), node("n1", "x")]);
    let cidr = "apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: k}\nspec: {cidrs: [10.0.0.0/24]}\n";
    let rig = Rig::new(&[("all.yaml", &old), ("cidr.yaml", cidr)]);
    let k = ("cidr /k", "10.0.0.0/24");
    rig.state(&[A, S, ("node n1", "x"), k]).await;
    let mut wanted = vec![state(&[A, S, ("node n1", "x"), k])];
    for round in 0..20 {
        let (ip, address, zone) = (format!("10.0.1.{round}"), format!("10.1.1.{round}"), format!("z{round}"));
        let new = documents(&[service("a", &ip), slice("a-1", "a", &address), node("n1", &zone)]);
        rig.replace("all.yaml", &new);
        let now = [(A.0, &*ip), (S.0, &*address), ("node n1", &*zone), k];
        rig.state(&now).await;
        wanted.push(state(&now));
    }
    assert_eq!(rig.recorded.get().states, wanted);
}

#[tokio::test]
async fn a_file_that_is_written_slowly_is_read_once_complete() {
    let rig = Rig::new(&[("a.yaml", &documents(&[a(), b()]))]);
    rig.state(&[A, B]).await;
    let mut file = OpenOptions::new().write(true).truncate(true).open(rig.folder.join("a.yaml")).unwrap();
    for part in [a2(), "---\n".to_owned(), b()] {
        file.write_all(part.as_bytes()).unwrap();
        file.flush().unwrap();
        // Longer than the settle time of a file that no known process writes to.
        tokio::time::sleep(quick().settle * 3).await;
    }
    drop(file);
    rig.state(&[A2, B]).await;
    assert_eq!(rig.recorded.get().states, [state(&[A, B]), state(&[A2, B])]);
}

#[tokio::test]
async fn an_open_file_is_read_when_quiet_or_after_the_maximum_time() {
    let rig = Rig::with(&[], |parts| {
        parts.timing.settle_while_open = Duration::from_millis(200);
        parts.timing.settle_max = Duration::from_millis(600);
    });
    rig.state(&[]).await;
    let mut quiet = fs::File::create(rig.folder.join("a.yaml")).unwrap();
    quiet.write_all(a().as_bytes()).unwrap();
    rig.state(&[A]).await;
    let mut busy = fs::File::create(rig.folder.join("b.yaml")).unwrap();
    busy.write_all(b().as_bytes()).unwrap();
    let wanted = state(&[A, B]);
    let start = Instant::now();
    while rig.recorded.get().states.last() != Some(&wanted) {
        assert!(start.elapsed() < TEST_TIMEOUT);
        busy.write_all(b"# more\n").unwrap();
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_removed_folder_keeps_its_objects_and_a_recreated_one_is_read() {
    let rig = Rig::with(&[("a.yaml", &a())], |parts| parts.timing.settle = Duration::from_secs(1));
    rig.state(&[A]).await;
    fs::rename(&rig.folder, rig.home().join("away")).unwrap();
    rig.until("it is healthy", |recorded, _| {
        recorded.health.len() == 4
            && recorded.health.values().all(|health| {
                matches!(health, JobHealth::Failing { reason, .. } if reason.contains("manifests") && reason.contains("No such file"))
            })
    })
    .await;
    assert_eq!(rig.recorded.get().states, [state(&[A])]);
    // It fills slowly.
    fs::create_dir(&rig.folder).unwrap();
    tokio::time::sleep(quick().poll_missing * 5).await;
    rig.write("b.yaml", &b());
    rig.write("a.yaml", &a2());
    rig.state(&[A2, B]).await;
    rig.is_healthy().await;
    rig.remove("b.yaml");
    rig.state(&[A2]).await;
    assert_eq!(rig.recorded.get().states.len(), 3, "never without both: {:#?}", rig.recorded.get().states);
}

#[tokio::test]
async fn a_folder_missing_at_the_start_is_awaited_without_a_list() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("not/yet");
    let rig = Rig::over(home, folder.clone(), |_| {});
    rig.until("it is healthy", |recorded, _| recorded.health.len() == 4).await;
    assert!(rig.recorded.get().events.iter().all(|event| matches!(event, SourceEvent::Health(..))));
    fs::create_dir_all(&folder).unwrap();
    rig.write("a.yaml", &a());
    rig.state(&[A]).await;
    assert_eq!(rig.handle.place(), folder.display().to_string());
}

#[tokio::test]
async fn a_folder_that_takes_the_place_of_another_is_followed() {
    let rig = Rig::new(&[("a.yaml", &a())]);
    rig.state(&[A]).await;
    let other = rig.home().join("other");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("b.yaml"), b()).unwrap();
    fs::rename(&rig.folder, rig.home().join("old")).unwrap();
    fs::rename(&other, &rig.folder).unwrap();
    rig.state(&[B]).await;
    rig.write("a.yaml", &a());
    rig.state(&[A, B]).await;
}

/// As the kubelet mounts a ConfigMap: files are links into `..data`, a link that is replaced.
#[tokio::test]
async fn a_mounted_config_map_is_switched_over_as_one() {
    let (home, folder) = manifests();
    let version = |number: u32, files: &[(&str, String)]| {
        let data = folder.join(format!("..{number}"));
        fs::create_dir(&data).unwrap();
        for (name, text) in files {
            fs::write(data.join(name), text).unwrap();
        }
        symlink(format!("..{number}"), folder.join("..data_tmp")).unwrap();
        fs::rename(folder.join("..data_tmp"), folder.join("..data")).unwrap();
    };
    version(1, &[("a.yaml", a()), ("s.yaml", s()), ("old.yaml", b())]);
    for name in ["a.yaml", "s.yaml", "old.yaml"] {
        symlink(format!("..data/{name}"), folder.join(name)).unwrap();
    }
    let rig = Rig::over(home, folder.clone(), |_| {});
    rig.state(&[A, B, S]).await;
    version(2, &[("a.yaml", a2()), ("s.yaml", slice("a-1", "a", "10.1.0.2"))]);
    rig.remove("old.yaml");
    fs::remove_dir_all(folder.join("..1")).unwrap();
    rig.state(&[A2, ("slice default/a-1", "10.1.0.2")]).await;
    rig.faults(&[]).await;
    assert_eq!(rig.recorded.get().states.len(), 2, "{:#?}", rig.recorded.get().states);
}

#[tokio::test]
async fn a_change_without_a_notice_is_found_by_a_scan() {
    let (home, folder) = manifests();
    let elsewhere = home.path().join("elsewhere.yaml");
    fs::write(&elsewhere, a()).unwrap();
    symlink(&elsewhere, folder.join("a.yaml")).unwrap();
    let rig = Rig::over(home, folder, |parts| parts.timing.poll = Duration::from_millis(50));
    rig.state(&[A]).await;
    fs::write(&elsewhere, a2()).unwrap();
    rig.state(&[A2]).await;
    fs::remove_file(&elsewhere).unwrap();
    rig.state(&[]).await;
    rig.faults(&[("a.yaml", 0, "has no target", false)]).await;
}

#[tokio::test]
async fn content_counts_not_the_time_of_a_file() {
    let rig = Rig::new(&[("a.yaml", &a())]);
    rig.state(&[A]).await;
    // Same size and same time.
    let path = rig.folder.join("a.yaml");
    let time = fs::metadata(&path).unwrap().modified().unwrap();
    rig.write("a.yaml", &a2());
    fs::File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
    rig.state(&[A2]).await;
    // Another time and same content.
    rig.recorded.get().events.clear();
    fs::File::options().write(true).open(&path).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
    rig.write("b.yaml", &b());
    rig.state(&[A2, B]).await;
    assert_eq!(rig.recorded.get().states.len(), 3);
}

#[tokio::test]
async fn the_node_is_the_one_of_this_name() {
    let full = "apiVersion: v1\nkind: Node\nmetadata:\n  name: n1\n  labels:\n    topology.kubernetes.io/zone: z1\n\
        spec:\n  podCIDR: 10.2.0.0/24\n  podCIDRs: [10.2.0.0/24, 'fd00::/64']\n  taints:\n  - {key: other, effect: NoSchedule}\n\
        status:\n  addresses:\n  - {type: ExternalIP, address: 192.0.2.1}\n  - {type: Hostname, address: n1}\n  \
        - {type: InternalIP, address: 10.9.0.1}\n  - {type: InternalIP, address: 'fd00::1'}\n";
    let rig = Rig::new(&[("node.yaml", full), ("other.yaml", &node("n2", "z9"))]);
    rig.state(&[("node n1", "z1")]).await;
    let view = |rig: &Rig| rig.recorded.get().node.clone().unwrap();
    let mut wanted = NodeView {
        name: "n1".to_owned(),
        exists: true,
        zone: Some("z1".to_owned()),
        ips: ["10.9.0.1", "fd00::1", "192.0.2.1"].iter().map(|ip| ip.parse().unwrap()).collect(),
        pod_cidrs: vec!["10.2.0.0/24".to_owned(), "fd00::/64".to_owned()],
        eligible: true,
    };
    assert_eq!(view(&rig), wanted);
    for (from, to) in [
        ("key: other", "key: ToBeDeletedByClusterAutoscaler"),
        ("  name: n1\n", "  name: n1\n  deletionTimestamp: 2020-01-01T00:00:00Z\n"),
    ] {
        rig.replace("node.yaml", &full.replacen(from, to, 1));
        rig.until("it is eligible", |recorded, _| !recorded.node.as_ref().unwrap().eligible).await;
        rig.replace("node.yaml", full);
        rig.until("it is not eligible", |recorded, _| recorded.node.as_ref().unwrap().eligible).await;
    }
    rig.replace("node.yaml", &full.replace("zone: z1", "zone: z2"));
    wanted.zone = Some("z2".to_owned());
    rig.state(&[("node n1", "z2")]).await;
    assert_eq!(view(&rig), wanted);
    rig.remove("node.yaml");
    rig.state(&[]).await;
    assert_eq!(view(&rig), NodeView { name: "n1".to_owned(), ..NodeView::default() });
}

#[tokio::test]
async fn without_notices_all_changes_are_found_by_scans() {
    let rig = Rig::with(&[("a.yaml", &a())], |parts| {
        parts.notices = false;
        parts.timing.poll = Duration::from_millis(30);
    });
    rig.state(&[A]).await;
    rig.replace("a.yaml", &documents(&[a2(), b()]));
    rig.state(&[A2, B]).await;
    let mut file = OpenOptions::new().append(true).open(rig.folder.join("a.yaml")).unwrap();
    file.write_all(format!("---\n{}", s()).as_bytes()).unwrap();
    rig.state(&[A2, B, S]).await;
    fs::rename(rig.folder.join("a.yaml"), rig.folder.join("b.yaml")).unwrap();
    rig.write("c.yaml", &node("n1", "z"));
    rig.state(&[A2, B, S, ("node n1", "z")]).await;
    rig.remove("b.yaml");
    rig.state(&[("node n1", "z")]).await;
}
