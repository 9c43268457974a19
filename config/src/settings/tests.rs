use super::*;

#[test]
fn every_default_passes_its_own_check_typed_and_untyped() {
    for key in schema() {
        assert_eq!(key.check(&key.default.clone().into()).as_ref(), Ok(&key.default), "{}", key.path);
        let text = match &key.default {
            Json::String(s) => s.clone(),
            Json::Array(all) => all.iter().map(|one| one.as_str().unwrap()).collect::<Vec<_>>().join(","),
            other => other.to_string(),
        };
        assert_eq!(key.check(&Raw::Untyped(text)).as_ref(), Ok(&key.default), "{}", key.path);
        assert!(key.doc.ends_with('.'), "{}", key.path);
    }
    assert_eq!(crate::relations::first_violation(&Settings::default()), None);
}

#[test]
fn defaults_are_the_documented_ones() {
    let flat: Vec<String> =
        Settings::default().flatten().iter().map(|f| format!("{}={}", f.key, f.value)).collect();
    for expected in [
        r#"agent.state_dir="/var/lib/keelson""#,
        r#"agent.drain_timeout="20s""#,
        r#"cri.listen="unix:///run/keelson/cri.sock""#,
        r#"cri.hold_timeout="1m40s""#,
        r#"cri.socket_mode="0660""#,
        r#"pulls.when_full="wait""#,
        "pulls.max_parallel_image_pulls=0",
        r#"pulls.progress_interval="500ms""#,
        r#"debug.http="127.0.0.1:9440""#,
        r#"proxy.target="""#,
        "proxy.cluster_cidr=[]",
        "proxy.nodeport_addresses=[]",
        r#"proxy.healthz_bind_address="0.0.0.0:10256""#,
        "proxy.masquerade_bit=14",
        "feature_gates.PullDeduplication=true",
        "feature_gates.PerRegistryPullLimit=false",
    ] {
        assert!(flat.iter().any(|line| line == expected), "{expected} not in {flat:#?}");
    }
    assert_eq!(flat.len(), schema().len() + Gate::ALL.len());
}
