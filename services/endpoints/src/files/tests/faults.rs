//! Faults are reported, and do not affect other files.

use super::*;

#[tokio::test]
async fn an_invalid_file_keeps_its_last_valid_version_until_it_is_repaired() {
    let rig = Rig::new(&[("ab.yaml", &documents(&[a(), b()]))]);
    rig.state(&[A, B]).await;
    // The first document is valid and has changed; the second is invalid.
    let broken = documents(&[a2(), b()]) + "  bad\n";
    rig.replace("ab.yaml", &broken);
    rig.until("no fault", |_, faults| faults.len() == 1).await;
    let fault = rig.handle.faults().remove(0);
    assert_eq!((&*fault.file, fault.earlier_in_use), ("ab.yaml", true));
    assert!(fault.line >= 18 && !fault.reason.contains('\n'), "{fault:?}");
    rig.write("c.yaml", &service("c", "10.0.0.3"));
    let c = ("service default/c", "10.0.0.3");
    rig.state(&[A, B, c]).await;
    rig.replace("ab.yaml", &a2());
    rig.state(&[A2, c]).await;
    rig.faults(&[]).await;
    // An invalid file that is deleted is gone.
    rig.replace("ab.yaml", &broken);
    rig.faults(&[("ab.yaml", fault.line, "", true)]).await;
    rig.remove("ab.yaml");
    rig.state(&[c]).await;
    rig.faults(&[]).await;
}

#[tokio::test]
async fn a_file_that_is_broken_from_the_start_contributes_nothing() {
    let broken = documents(&[a(), "kind: Service\n".to_owned()]);
    let rig = Rig::new(&[("a.yaml", &broken), ("b.yaml", &b())]);
    rig.state(&[B]).await;
    rig.faults(&[("a.yaml", 11, "apiVersion is missing", false)]).await;
    rig.write("a.yaml", &a());
    rig.state(&[A, B]).await;
    rig.faults(&[]).await;
}

#[tokio::test]
async fn of_two_objects_of_one_name_the_one_in_the_first_file_counts() {
    let other = "# another\n".to_owned() + &service("a", "10.0.0.5");
    let rig = Rig::new(&[("m.yaml", &documents(&[a(), b()])), ("z.yaml", &other)]);
    rig.state(&[A, B]).await;
    rig.faults(&[("z.yaml", 2, "Service default/a is also defined in m.yaml", false)]).await;
    // A file that sorts first takes over, whenever it was written.
    rig.write("c.yaml", &service("a", "10.0.0.7"));
    rig.state(&[("service default/a", "10.0.0.7"), B]).await;
    rig.faults(&[
        ("m.yaml", 1, "is also defined in c.yaml", false),
        ("z.yaml", 2, "is also defined in c.yaml", false),
    ])
    .await;
    rig.remove("c.yaml");
    rig.state(&[A, B]).await;
    rig.replace("m.yaml", &b());
    rig.state(&[("service default/a", "10.0.0.5"), B]).await;
    rig.faults(&[]).await;
}

#[tokio::test]
async fn a_file_that_is_too_large_or_unreadable_is_named() {
    let rig = Rig::with(&[("a.yaml", &a())], |parts| parts.max_file_bytes = 300);
    rig.state(&[A]).await;
    rig.write("a.yaml", &(a2() + &"# long\n".repeat(100)));
    rig.faults(&[("a.yaml", 0, "larger than 300 bytes", true)]).await;
    assert_eq!(rig.recorded.get().states, [state(&[A])]);
    rig.write("a.yaml", &a2());
    rig.state(&[A2]).await;
    rig.faults(&[]).await;
}

#[tokio::test]
async fn other_files_are_ignored() {
    let bad = "{{{";
    let names = [".hidden.yaml", "a.yaml~", "a.yaml.tmp", ".a.yaml.swp", "README.md", "a.yaml.swp", "yaml"];
    let files: Vec<(&str, &str)> = names.iter().map(|name| (*name, bad)).collect();
    let rig = Rig::new(&files);
    fs::create_dir(rig.folder.join("sub.yaml")).unwrap();
    fs::write(rig.folder.join("sub.yaml/a.yaml"), bad).unwrap();
    nix::unistd::mkfifo(&rig.folder.join("pipe.yaml"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    rig.write("a.yaml", &a());
    rig.state(&[A]).await;
    rig.faults(&[]).await;
}
