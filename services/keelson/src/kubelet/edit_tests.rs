use super::{
    super::{
        CONFIG, Process,
        testing::{kubelet, source},
    },
    *,
};

const OURS: &str = "unix:///run/keelson/cri.sock";
const HEAD: &str =
    "# by kubeadm\napiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nzones: [a, b]\n";

fn sockets() -> Sockets {
    Sockets(vec!["/run/keelson/cri.sock".into()])
}

/// The kubelet after the edits, with the copies that they make.
fn applied(before: &Kubelet, direction: Direction, plan: &Plan) -> Kubelet {
    let mut after = before.clone();
    for edit in &plan.edits {
        let found = after.sources.iter().position(|source| source.path == edit.path);
        match (found, &edit.after) {
            (Some(place), Some(text)) => {
                let source = &mut after.sources[place];
                match direction {
                    Direction::Attach if edit.saves => source.saved.clone_from(&edit.before),
                    Direction::Attach | Direction::Bypass => {}
                }
                source.text.clone_from(text);
            }
            (Some(place), None) => drop(after.sources.remove(place)),
            (None, Some(text)) => {
                let place = place_of_drop_in(&after.sources, &edit.path);
                after.sources.insert(place, source(Kind::DropIn, &edit.path.display().to_string(), text));
            }
            (None, None) => panic!("removes a file that does not exist"),
        }
    }
    if direction == Direction::Bypass {
        after.sources.iter_mut().for_each(|source| source.saved = None);
    }
    after
}

fn attached(before: &Kubelet) -> Kubelet {
    let plan = attach(before, OURS).expect("can be attached");
    let after = applied(before, Direction::Attach, &plan);
    for (key, want) in wanted(OURS) {
        let is = after.configured(key).map(|value| value.text);
        assert!(is_met(key, is.as_deref(), want), "{key:?}: {is:?}");
    }
    // Idempotent.
    assert_eq!(attach(&after, OURS).expect("is attached").edits, []);
    after
}

fn bypassed(before: &Kubelet) -> Kubelet {
    let plan = bypass(before, &sockets(), None).expect("can be bypassed");
    let after = applied(before, Direction::Bypass, &plan);
    assert_eq!(after.uses(&sockets()), []);
    assert_eq!(bypass(&after, &sockets(), None).expect("is bypassed").edits, [], "idempotent");
    after
}

fn texts(kubelet: &Kubelet) -> Vec<(&Path, &str)> {
    kubelet.sources.iter().map(|source| (source.path.as_path(), source.text.as_str())).collect()
}

/// O1, O2: what was there before is there again, to the byte.
#[test]
fn o2_a_bypass_restores_what_attach_found() {
    let keys = [
        "",
        "serializeImagePulls: true # one at a time, please\n",
        "serializeImagePulls: false\nmaxParallelImagePulls: 4\nregistryPullQPS: 2\nzone: x\n",
        "registryPullQPS: 0\n",
        "containerRuntimeEndpoint: unix:///run/crio/crio.sock\n",
        "imageServiceEndpoint: unix:///run/other.sock\n",
        "containerRuntimeEndpoint: \"\"\nimageServiceEndpoint: \"\"\n",
    ];
    let flags = [
        None,
        Some(
            "KUBELET_KUBEADM_ARGS=\"--container-runtime-endpoint=unix:///run/containerd/containerd.sock --v=2\"\n",
        ),
        Some("KUBELET_KUBEADM_ARGS=\"--registry-qps=7 --image-service-endpoint=unix:///a --v=2\"\n"),
        Some("KUBELET_KUBEADM_ARGS=\"--serialize-image-pulls=true\"\n"),
    ];
    for config_dir in [None, Some(PathBuf::from("/etc/kubernetes/kubelet.conf.d"))] {
        for keys in keys {
            for flags in flags {
                if keys.contains("Pulls: 4") && flags.is_some_and(|flags| flags.contains("pulls=true")) {
                    // No kubelet starts with both.
                    continue;
                }
                let mut sources = vec![source(Kind::Config, CONFIG, &format!("{HEAD}{keys}"))];
                sources.extend(flags.map(|text| source(Kind::Flags, "/kubeadm-flags.env", text)));
                let before = Kubelet { config_dir: config_dir.clone(), ..kubelet(sources) };
                let plan = attach(&before, OURS).expect("can be attached");
                // Also if the first attach is interrupted.
                for written in 0..=plan.edits.len() {
                    let part = Plan { edits: plan.edits[..written].to_vec(), ..Plan::default() };
                    let interrupted = applied(&before, Direction::Attach, &part);
                    let leads = |kubelet: &Kubelet| !kubelet.uses(&sockets()).is_empty();
                    assert_eq!(leads(&interrupted), written > 0, "the endpoint is first: {plan:?}");
                    let after = bypassed(&attached(&interrupted));
                    assert_eq!(texts(&after), texts(&before), "{config_dir:?} {keys} {flags:?} {written}");
                }
            }
        }
    }
}

/// O6: the file that kubeadm rewrites is not touched.
#[test]
fn o6_with_a_drop_in_directory_the_configuration_file_stays() {
    let config = format!("{HEAD}serializeImagePulls: true\nregistryPullQPS: 3\n");
    let before = Kubelet {
        config_dir: Some("/conf.d".into()),
        ..kubelet(vec![
            source(Kind::Config, CONFIG, &config),
            source(Kind::DropIn, "/conf.d/10-a.conf", "registryPullQPS: 4\n"),
        ])
    };
    let after = attached(&before);
    let changed: Vec<_> = after.sources.iter().filter(|source| !before.sources.contains(source)).collect();
    assert_eq!(changed.len(), 1);
    assert_eq!(changed[0].path, Path::new("/conf.d/20-keelson.conf"));
    assert_eq!(
        changed[0].text,
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nimageServiceEndpoint: \
         unix:///run/keelson/cri.sock\nserializeImagePulls: false\nregistryPullQPS: 0\n"
    );
    // A limit of the kubelet would hide pulls, and a drop-in cannot unset it.
    let limited = format!("{config}maxParallelImagePulls: 2\n").replace("true", "false");
    let mut before = before;
    before.sources[0].text.clone_from(&limited);
    let after = attached(&before);
    assert_eq!(after.sources[0].text, limited.replace("maxParallelImagePulls: 2\n", ""));
    assert_eq!(texts(&bypassed(&after)), texts(&before));
    // A later drop-in that says something else is changed, too.
    before.sources.push(source(Kind::DropIn, "/conf.d/30-z.conf", "registryPullQPS: 8\n"));
    assert_eq!(texts(&bypassed(&attached(&before))), texts(&before));
}

/// Seen with kubelet 1.36: it did not start with a drop-in and `cgroupsPerQOS: false`.
#[test]
fn empty_lists_are_repeated_in_the_first_drop_in() {
    let config =
        source(Kind::Config, CONFIG, &format!("{HEAD}enforceNodeAllocatable: []\nregisterWithTaints: []\n"));
    let mut before = Kubelet { config_dir: Some("/conf.d".into()), ..kubelet(vec![config]) };
    let drop_in = |before: &Kubelet| attached(before).sources.last().map(|source| source.text.clone());
    assert!(
        drop_in(&before)
            .is_some_and(|text| text.contains("enforceNodeAllocatable: []\nregisterWithTaints: []\n"))
    );
    before.sources.push(source(Kind::DropIn, "/conf.d/10-a.conf", "zone: a\n"));
    assert!(drop_in(&before).is_some_and(|text| !text.contains("[]")), "it was so before");
}

/// O6: `kubeadm upgrade node` writes the file anew; the next attach saves the new values.
#[test]
fn o6_after_kubeadm_has_rewritten_the_file() {
    let file = |keys: &str| format!("{HEAD}{keys}");
    let mut node = attached(&kubelet(vec![source(Kind::Config, CONFIG, &file("registryPullQPS: 5\n"))]));
    node.sources[0].text = file("registryPullQPS: 9\n");
    assert_eq!(bypass(&node, &sockets(), None).expect("nothing to do").edits, [], "kubeadm's values stay");
    let node = bypassed(&attached(&node));
    assert_eq!(node.sources[0].text, file("registryPullQPS: 9\n"));
}

/// A value that an administrator has set since then stays.
#[test]
fn keys_that_were_changed_since_then_stay() {
    let mut node = attached(&kubelet(vec![source(
        Kind::Config,
        CONFIG,
        &format!("{HEAD}serializeImagePulls: true\nregistryPullQPS: 5\n"),
    )]));
    node.sources[0].text =
        node.sources[0].text.replace("registryPullQPS: 0", "registryPullQPS: 3") + "maxPods: 9\n";
    let after = bypassed(&node);
    assert_eq!(
        after.sources[0].text,
        format!("{HEAD}serializeImagePulls: true\nregistryPullQPS: 3\nmaxPods: 9\n")
    );
}

/// The kubelet's validation refuses `serializeImagePulls: true` with a limit above 1.
#[test]
fn a_limit_comes_back_only_where_pulls_are_parallel() {
    let file = |keys: &str| format!("{HEAD}{keys}");
    let cases = [
        // Before attach, while it is attached, after the bypass.
        (
            "serializeImagePulls: false\nmaxParallelImagePulls: 4\n",
            "",
            "maxParallelImagePulls: 4\nserializeImagePulls: false\n",
        ),
        (
            "serializeImagePulls: true\n",
            "imageServiceEndpoint: unix:///run/keelson/cri.sock\nserializeImagePulls: false\nmaxParallelImagePulls: 5\n",
            "serializeImagePulls: false\nmaxParallelImagePulls: 5\n",
        ),
        (
            "serializeImagePulls: true\n",
            "imageServiceEndpoint: unix:///run/keelson/cri.sock\nserializeImagePulls: false\nmaxParallelImagePulls: 1\n",
            "serializeImagePulls: true\nmaxParallelImagePulls: 1\n",
        ),
    ];
    for (before, while_attached, expected) in cases {
        let mut node = attached(&kubelet(vec![source(Kind::Config, CONFIG, &file(before))]));
        node.sources[0].text = file(while_attached);
        assert_eq!(bypassed(&node).sources[0].text, file(expected), "{before} {while_attached}");
    }
    // The flag counts more than the file.
    let flags = "A=\"--serialize-image-pulls=true\"\n";
    let mut node =
        attached(&kubelet(vec![source(Kind::Config, CONFIG, HEAD), source(Kind::Flags, "/env", flags)]));
    node.sources[0].text += "maxParallelImagePulls: 5\n";
    assert_eq!(bypassed(&node).sources[1].text, flags.replace("true", "false"));
}

/// A copy of an attached file would restore the agent's socket.
#[test]
fn a_copy_is_never_one_of_an_attached_file() {
    for config_dir in [None, Some(PathBuf::from("/conf.d"))] {
        let keys = format!("{HEAD}serializeImagePulls: true\nregistryPullQPS: 5\n");
        let flags = source(Kind::Flags, "/env", "A=\"--registry-qps=7 --v=2\"\n");
        let sources = vec![source(Kind::Config, CONFIG, &keys), flags];
        let before = Kubelet { config_dir, ..kubelet(sources) };
        // cri.listen was another one.
        let plan = attach(&before, "unix:///run/former.sock").expect("can be attached");
        let mut node = applied(&before, Direction::Attach, &plan);
        let after = bypassed(&attached(&node));
        assert_eq!(texts(&after), texts(&before));
        // A limit that kubeadm has added since then has no copy yet.
        let limited =
            |text: &str| format!("{text}maxParallelImagePulls: 3\n").replace("Pulls: true", "Pulls: false");
        node.sources[0].text = limited(&node.sources[0].text);
        let expected = if node.sources[0].saved.is_some() { keys } else { limited(&keys) };
        assert_eq!(bypassed(&attached(&node)).sources[0].text, expected);
    }
}

/// Put in by hand before attach.
#[test]
fn the_agents_own_endpoint_is_not_restored() {
    for (keys, runtime, expected) in [
        ("containerRuntimeEndpoint: unix:///run/keelson/cri.sock\n", None, ""),
        (
            "containerRuntimeEndpoint: /run/keelson/cri.sock\nregistryPullQPS: 3\n",
            Some("unix:///run/crio/crio.sock"),
            "containerRuntimeEndpoint: unix:///run/crio/crio.sock\nregistryPullQPS: 3\n",
        ),
        ("imageServiceEndpoint: /run/keelson/cri.sock\nregistryPullQPS: 3\n", None, ""),
    ] {
        let node = attached(&kubelet(vec![source(Kind::Config, CONFIG, &format!("{HEAD}{keys}"))]));
        let plan = bypass(&node, &sockets(), runtime).expect("can be bypassed");
        assert_eq!(plan.edits[0].after, Some(format!("{HEAD}{expected}")), "{keys}");
    }
}

#[test]
fn a_configuration_file_is_not_created() {
    let flags = source(Kind::Flags, "/env", "A=\"--v=2\"\n");
    let error = attach(&kubelet(vec![flags]), OURS).expect_err("refused").to_string();
    assert_eq!(
        error,
        "/var/lib/kubelet/config.yaml does not exist; name the kubelet's configuration file with --kubelet-config"
    );
}

/// Put in by hand, or the copy is lost.
#[test]
fn without_saved_values_the_defaults_apply_and_it_says_so() {
    let ours = format!("imageServiceEndpoint: {OURS}\nserializeImagePulls: false\nregistryPullQPS: 0\n");
    for (keys, runtime, expected) in [
        (ours.clone(), None, ""),
        (
            format!("{ours}maxParallelImagePulls: 3\n"),
            None,
            "maxParallelImagePulls: 3\nserializeImagePulls: false\n",
        ),
        (
            format!("containerRuntimeEndpoint: {OURS}\n{ours}"),
            Some("unix:///run/crio/crio.sock"),
            "containerRuntimeEndpoint: unix:///run/crio/crio.sock\n",
        ),
        (format!("containerRuntimeEndpoint: {OURS}\n"), None, ""),
    ] {
        let node = kubelet(vec![source(Kind::Config, CONFIG, &format!("{HEAD}{keys}"))]);
        let plan = bypass(&node, &sockets(), runtime).expect("can be bypassed");
        assert_eq!(plan.edits[0].after, Some(format!("{HEAD}{expected}")), "{keys}");
        assert_eq!(plan.notes.len(), 1);
        assert!(plan.notes[0].contains("no values were saved"), "{}", plan.notes[0]);
    }
    let others =
        kubelet(vec![source(Kind::Config, CONFIG, "serializeImagePulls: false\nregistryPullQPS: 0\n")]);
    assert_eq!(bypass(&others, &sockets(), None).expect("nothing to do"), Plan::default());
}

/// O7: flags count more than files.
#[test]
fn o7_flags_that_no_edit_reaches_are_refused() {
    let config = source(Kind::Config, CONFIG, HEAD);
    let unit =
        source(Kind::Unit, "/u/kubelet.service", "ExecStart=/k --image-service-endpoint=unix:///a \\\n");
    let error = attach(&kubelet(vec![config.clone(), unit.clone()]), OURS).expect_err("refused").to_string();
    assert!(error.starts_with("/u/kubelet.service sets --image-service-endpoint"), "{error}");
    let arguments = vec!["kubelet".to_owned(), "--registry-qps=3".to_owned()];
    let running = Kubelet { process: Some(Process { pid: 7, arguments }), ..kubelet(vec![config.clone()]) };
    let error = attach(&running, OURS).expect_err("refused").to_string();
    assert!(error.starts_with("the running kubelet (process 7) has --registry-qps"), "{error}");
    // A unit that leads to the agent is not changed, and named.
    let unit = Source { text: unit.text.replace("unix:///a", OURS), ..unit };
    let plan = bypass(&kubelet(vec![config, unit]), &sockets(), None).expect("planned");
    assert!(plan.edits.is_empty() && plan.notes[0].starts_with("/u/kubelet.service: "), "{plan:?}");
}

#[test]
fn files_that_cannot_be_edited_are_named() {
    let error =
        attach(&kubelet(vec![source(Kind::Config, CONFIG, "{\"kind\": \"x\"}")]), OURS).expect_err("JSON");
    assert!(
        error.to_string().starts_with("cannot edit /var/lib/kubelet/config.yaml: it is written in flow"),
        "{error}"
    );
}
