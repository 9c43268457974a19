//! The shipped file and the reference page match the table of settings, and parse.
//!
//! `KEELSON_BLESS=1 cargo test -p keelson-config --test shipped` rewrites both from the table of settings.

#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests are tests, which clippy.toml does not see

use std::path::{Path, PathBuf};

use keelson_config::{Format, Gate, Loaded, Origin, Settings, Sources, load, render_show, schema, shipped};

fn crate_file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Compares a file with `expected`, or rewrites it if `KEELSON_BLESS` is set.
fn compare_or_bless(path: &Path, expected: &str) {
    if std::env::var_os("KEELSON_BLESS").is_some() {
        std::fs::write(path, expected).unwrap();
    }
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text == expected, "{} is out of step with the table of settings; see this test", path.display());
}

fn load_text(text: &str) -> Loaded {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("keelson.toml");
    std::fs::write(&file, text).unwrap();
    let sources = Sources { file: Some(file), ..Sources::new("node-1") };
    load(&sources).unwrap_or_else(|errors| panic!("{errors}\n{text}"))
}

fn defaults() -> Settings {
    let mut settings = Settings::default();
    settings.agent.node_name = "node-1".into();
    settings
}

#[test]
fn the_example_is_made_from_the_table() {
    compare_or_bless(&crate_file("keelson.toml"), &shipped::example());
}

#[test]
fn the_example_parses_and_changes_nothing() {
    let loaded = load_text(shipped::EXAMPLE);
    assert_eq!(*loaded.settings, defaults());
    assert!(loaded.entries.iter().all(|entry| entry.origin == Origin::Default));
}

#[test]
fn the_example_uncommented_sets_every_key_to_its_default() {
    let uncommented: String = shipped::EXAMPLE
        .lines()
        .map(|line| match line.strip_prefix('#') {
            Some(rest) if !rest.starts_with(' ') => format!("{rest}\n"),
            _ => format!("{line}\n"),
        })
        .collect();
    let loaded = load_text(&uncommented);
    assert_eq!(*loaded.settings, defaults());
    for entry in &loaded.entries {
        assert!(matches!(entry.origin, Origin::File { .. }), "{} is not in the example", entry.key);
    }
    assert_eq!(loaded.entries.len(), schema().len() + Gate::ALL.len());
}

#[test]
fn the_reference_page_is_up_to_date() {
    const BEGIN: &str = "<!-- settings: begin -->\n";
    const END: &str = "<!-- settings: end -->\n";
    let path = crate_file("../docs/configuration.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (head, rest) = page.split_once(BEGIN).expect("begin mark");
    let (_, tail) = rest.split_once(END).expect("end mark");
    compare_or_bless(&path, &format!("{head}{BEGIN}\n{}\n{END}{tail}", shipped::reference()));
}

#[test]
fn every_toml_block_of_the_page_parses() {
    let page = std::fs::read_to_string(crate_file("../docs/configuration.md")).unwrap();
    let blocks: Vec<&str> =
        page.split("```toml\n").skip(1).map(|rest| rest.split_once("```").expect("end of block").0).collect();
    assert!(!blocks.is_empty());
    for block in blocks {
        load_text(block);
    }
}

#[test]
fn shown_as_toml_it_is_a_file_that_gives_the_same_settings() {
    let loaded = load_text("[pulls]\nwhen_full = \"reject\"\n[feature_gates]\nAllAlpha = true\n");
    let text = render_show(&loaded, Format::Toml);
    assert!(text.contains("when_full = \"reject\"  # "), "{text}");
    assert!(text.contains("keelson.toml:2\n"), "{text}");
    assert!(text.contains("PerRegistryPullLimit = true  # "), "{text}");
    assert!(text.contains("keelson.toml:4\n"), "{text}");
    assert!(text.contains("enforce = \"agent\"  # default\n"), "{text}");
    assert_eq!(*load_text(&text).settings, *loaded.settings);
}

#[test]
fn shown_as_table_and_json() {
    let loaded = load_text("[pulls]\nmax_parallel_image_pulls = 3\n");
    let table = render_show(&loaded, Format::Table);
    let line = table.lines().find(|line| line.starts_with("pulls.max_parallel_image_pulls")).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words[1..3], ["3", "live"]);
    assert!(words[3].ends_with("keelson.toml:2"), "{line}");
    assert!(table.starts_with("file: /"), "{table}");

    let json: serde_json::Value = serde_json::from_str(&render_show(&loaded, Format::Json)).unwrap();
    let entry = &json["settings"]["pulls.max_parallel_image_pulls"];
    assert_eq!(
        (&entry["value"], &entry["source"], &entry["live"]),
        (&3.into(), &"file".into(), &true.into())
    );
    assert_eq!(json["settings"]["cri.socket_mode"]["value"], "0660");
    assert_eq!(json["settings"].as_object().unwrap().len(), loaded.entries.len());
}

/// P11: of the node, the pod of the DaemonSet mounts the folder of the Endpoints API, and no folder with another
/// socket: a process that reaches `cri.sock` is root on the node.
#[test]
fn p11_the_proxys_pod_reaches_the_endpoints_socket_and_no_other() {
    let manifest = std::fs::read_to_string(crate_file("../packaging/kustomize/proxy/proxy.yaml")).unwrap();
    let host_paths: Vec<&Path> = manifest
        .lines()
        .filter_map(|line| line.trim().strip_prefix("hostPath: { path: ")?.split(',').next())
        .map(Path::new)
        .collect();
    assert_eq!(host_paths.len(), manifest.matches("hostPath:").count(), "a hostPath of another form");
    let settings = defaults();
    let sees = |socket: &Path| host_paths.iter().any(|path| socket.starts_with(path));
    assert!(sees(settings.proxy_target().unwrap().path()), "{host_paths:?}");
    for socket in [&settings.cri.listen, &settings.debug.listen, &settings.cri.runtime_endpoint] {
        assert!(!sees(socket.path()), "{socket} is in one of {host_paths:?}");
    }
}
