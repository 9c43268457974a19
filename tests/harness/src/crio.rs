//! Owns: the configuration of a CRI-O of the test. In: the test's folder and [`Options`]. Out: the program, all of
//! whose files, sockets and settings are in that folder; [`crate::containerd::Containerd`] starts and stops it.
//!
//! Every registry on loopback is reached over plain HTTP. The folder `policies` holds the signature policies of single
//! namespaces, `NAMESPACE.json`, which CRI-O reads at every pull; other namespaces use `policy.json`.

use crate::containerd::{NETWORK_PLUGINS, Options};
use crate::peers;
use crate::process::Program;
use anyhow::{Context as _, Result};
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// File name of its socket.
pub(crate) const SOCKET: &str = "crio.sock";

/// Folder of the signature policies of single namespaces, below the folder of the CRI-O.
pub const POLICIES: &str = "policies";

/// Writes the settings into `folder` and returns the program that runs with them. `driver` is a storage driver that
/// works there.
pub(crate) fn program(folder: &Path, driver: &str, options: &Options) -> Result<Program> {
    for name in [POLICIES, "registries.d", "hooks", "tmp", "cni"] {
        let path = folder.join(name);
        fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
    }
    let peer = peers::crio()?;
    let conmon = peers::system("conmon", "conmon")?;
    let runc = runc(folder)?;
    let settings = settings(folder, driver, options, &peer.join("pinns"), &conmon, &runc);
    let files = [
        ("crio.conf", settings),
        ("registries.conf", registries(&options.mirrors)),
        ("policy.json", json!({"default": [{"type": "insecureAcceptAnything"}]}).to_string()),
        // Read even if every storage setting is given; without it CRI-O reads the file of the machine.
        ("storage.conf", storage(folder, driver)),
    ];
    for (name, text) in files {
        let path = folder.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let at = folder.display();
    Ok(Program {
        name: "crio".to_owned(),
        path: peer.join("crio"),
        args: vec![
            format!("--config={at}/crio.conf"),
            "--config-dir=".to_owned(),
            format!("--registries-conf={at}/registries.conf"),
            format!("--registries-conf-dir={at}/registries.d"),
        ],
        env: vec![
            ("CONTAINERS_STORAGE_CONF".to_owned(), format!("{at}/storage.conf")),
            ("TMPDIR".to_owned(), format!("{at}/tmp")),
        ],
        log: folder.join("crio.log"),
    })
}

/// A runc that omits the limits of huge pages, which a kubelet always sets. CRI-O passes them on if the kernel knows
/// the controller, though it may be in no hierarchy; containerd has a setting for that.
fn runc(folder: &Path) -> Result<PathBuf> {
    let runc = peers::system("runc", "runc")?;
    let path = folder.join("runc-without-huge-pages");
    let script = format!(
        "#!/bin/sh\nlast=\nfor arg; do\n\
         [ \"$last\" = --bundle ] && sed -z -i 's/\"hugepageLimits\": *\\[[^]]*\\]/\"hugepageLimits\": []/' \"$arg/config.json\"\n\
         last=$arg\ndone\nexec {} \"$@\"\n",
        runc.display()
    );
    fs::write(&path, script)
        .and_then(|()| fs::set_permissions(&path, Permissions::from_mode(0o755)))
        .with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

fn settings(
    folder: &Path,
    driver: &str,
    options: &Options,
    pinns: &Path,
    conmon: &Path,
    runc: &Path,
) -> String {
    let at = folder.display();
    let (pinns, conmon, runc) = (pinns.display(), conmon.display(), runc.display());
    let pause = options.sandbox_image.as_ref().map(|image| format!("pause_image = \"{image}\"\n"));
    let pause = pause.unwrap_or_default();
    let progress = options.image_pull_progress_timeout.as_ref();
    let progress = progress.map(|time| format!("pull_progress_timeout = \"{time}\"\n")).unwrap_or_default();
    format!(
        "[crio]\nroot = \"{at}/root\"\nrunroot = \"{at}/runroot\"\nstorage_driver = \"{driver}\"\n\
         log_dir = \"{at}/logs\"\nversion_file = \"{at}/version\"\nversion_file_persist = \"\"\n\
         clean_shutdown_file = \"{at}/clean.shutdown\"\n\
         [crio.api]\nlisten = \"{at}/{SOCKET}\"\n\
         [crio.runtime]\ndefault_runtime = \"runc\"\ncgroup_manager = \"cgroupfs\"\nconmon = \"{conmon}\"\n\
         conmon_cgroup = \"pod\"\npinns_path = \"{pinns}\"\ndecryption_keys_path = \"{at}/keys\"\n\
         hooks_dir = [\"{at}/hooks\"]\ncontainer_exits_dir = \"{at}/exits\"\n\
         container_attach_socket_dir = \"{at}/attach\"\nnamespaces_dir = \"{at}/ns\"\ncdi_spec_dirs = []\n\
         irqbalance_config_file = \"\"\nirqbalance_config_restore_file = \"disable\"\nenable_criu_support = false\n\
         [crio.runtime.runtimes.runc]\nruntime_path = \"{runc}\"\nruntime_root = \"{at}/runc\"\n\
         monitor_path = \"{conmon}\"\nmonitor_cgroup = \"pod\"\n\
         [crio.image]\nsignature_policy = \"{at}/policy.json\"\nsignature_policy_dir = \"{at}/{POLICIES}\"\n\
         big_files_temporary_dir = \"{at}/tmp\"\n{pause}{progress}\
         [crio.network]\nnetwork_dir = \"{at}/cni\"\nplugin_dirs = [\"{at}/{NETWORK_PLUGINS}\"]\n\
         [crio.nri]\nenable_nri = false\n"
    )
}

fn storage(folder: &Path, driver: &str) -> String {
    let at = folder.display();
    format!("[storage]\ndriver = \"{driver}\"\ngraphroot = \"{at}/root\"\nrunroot = \"{at}/runroot\"\n")
}

/// The prefix of a registry matches it with any port.
fn registries(mirrors: &BTreeMap<String, String>) -> String {
    let mut text = "unqualified-search-registries = []\nshort-name-mode = \"disabled\"\n\
                    [[registry]]\nlocation = \"127.0.0.1\"\ninsecure = true\n"
        .to_owned();
    for (name, address) in mirrors {
        let _ =
            write!(text, "[[registry]]\nprefix = \"{name}\"\nlocation = \"{address}\"\ninsecure = true\n");
    }
    text
}
