//! Finds the files of the kubelet.
//!
//! Owns: the list of places. In: a root folder; the files of kubeadm, of distributions' packages and of systemd below it; `/proc`.
//! Out: a [`Kubelet`]. Nothing is written.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use super::{CONFIG, Kind, Kubelet, Process, Source, files, flags};

/// Files with flags, in rising precedence in kubeadm's unit (`$KUBELET_KUBEADM_ARGS $KUBELET_EXTRA_ARGS`).
const FLAGS: [&str; 3] =
    ["/var/lib/kubelet/kubeadm-flags.env", "/etc/sysconfig/kubelet", "/etc/default/kubelet"];
const UNITS: [&str; 3] = ["/usr/lib/systemd/system", "/lib/systemd/system", "/etc/systemd/system"];

#[derive(Debug, Clone, Default)]
pub(crate) struct Options {
    /// Instead of `/`.
    pub(crate) root: PathBuf,
    /// Folder whose `config.yaml` is read if no flag of the kubelet names a file; by default that of [`CONFIG`].
    pub(crate) root_dir: Option<PathBuf>,
    /// Instead of the file that the kubelet's flags name.
    pub(crate) config: Option<PathBuf>,
    /// Instead of the directory that the kubelet's flags name.
    pub(crate) config_dir: Option<PathBuf>,
}

impl Options {
    /// A path of the node below the root.
    pub(crate) fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        match self.root.as_os_str().is_empty() {
            true => path.to_owned(),
            false => self.root.join(path.strip_prefix("/").unwrap_or(path)),
        }
    }
}

pub(crate) fn find(options: &Options) -> Kubelet {
    let mut kubelet = Kubelet { process: running(options), ..Kubelet::default() };
    let units = unit_files(options).into_iter().map(|path| (Kind::Unit, path));
    let mut flag_files = Vec::new();
    for (kind, path) in units.chain(FLAGS.map(|path| (Kind::Flags, options.at(path)))) {
        add(kind, path, &mut flag_files, &mut kubelet.errors);
    }
    let named = |flag: &str| {
        let running = kubelet.process.as_ref().and_then(|process| process.flag(flag));
        running.or_else(|| flag_files.iter().rev().find_map(|source| flags::value(&source.text, flag)))
    };
    let path = |given: &Option<PathBuf>, flag| given.clone().or_else(|| named(flag).map(PathBuf::from));
    let default =
        || options.root_dir.as_ref().map_or_else(|| CONFIG.into(), |folder| folder.join("config.yaml"));
    let config = options.at(path(&options.config, "config").unwrap_or_else(default));
    kubelet.config_dir = path(&options.config_dir, "config-dir").map(|folder| options.at(folder));
    let mut sources = Vec::new();
    add(Kind::Config, config.clone(), &mut sources, &mut kubelet.errors);
    for file in kubelet.config_dir.iter().flat_map(|folder| drop_ins(folder)) {
        add(Kind::DropIn, file, &mut sources, &mut kubelet.errors);
    }
    sources.append(&mut flag_files);
    Kubelet { sources, config, ..kubelet }
}

fn add(kind: Kind, path: PathBuf, sources: &mut Vec<Source>, errors: &mut Vec<String>) {
    let text = match kind {
        // It is only read.
        Kind::Unit => fs::read(&path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()),
        Kind::Config | Kind::DropIn | Kind::Flags => fs::read_to_string(&path),
    };
    match text {
        Ok(text) => {
            let saved = fs::read_to_string(files::saved(&path)).ok();
            sources.push(Source { path, kind, text, saved });
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => errors.push(format!("cannot read {}: {error}", path.display())),
    }
}

/// The kubelet reads files that end with `.conf`, also those in folders, in the order of their paths
/// (`filepath.WalkDir`).
fn drop_ins(folder: &Path) -> Vec<PathBuf> {
    let is_folder = |path: &Path| path.symlink_metadata().is_ok_and(|found| found.is_dir());
    let paths = listed(folder).into_iter();
    paths
        .flat_map(|path| match is_folder(&path) {
            true => drop_ins(&path),
            false => Vec::from_iter(is_conf(&path).then_some(path)),
        })
        .collect()
}

fn is_conf(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "conf")
}

fn listed(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.sort();
    files
}

fn unit_files(options: &Options) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders: Vec<PathBuf> = Vec::new();
    for folder in UNITS.map(|folder| options.at(folder)) {
        // /lib is a link to /usr/lib on most distributions.
        let real = fs::canonicalize(&folder).unwrap_or_else(|_| folder.clone());
        if folders.contains(&real) {
            continue;
        }
        folders.push(real);
        files.push(folder.join("kubelet.service"));
        let drop_ins = listed(&folder.join("kubelet.service.d")).into_iter();
        files.extend(drop_ins.filter(|path| is_conf(path) && !path.is_dir()));
    }
    files
}

/// The kubelet that sees the same files: not one of another container. If there are several, as on a machine with nodes of a test in
/// network namespaces of their own, the one in this network namespace.
fn running(options: &Options) -> Option<Process> {
    let of = |path: PathBuf| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let same_root = |pid: i32| of(options.at(format!("/proc/{pid}/root/"))) == of(options.at("/"));
    let network = |pid: &str| of(options.at(format!("/proc/{pid}/ns/net")));
    let own = network("self");
    let mut all = processes(&options.at("/proc"), "kubelet");
    all.retain(|process| same_root(process.pid));
    let nearest = all.iter().position(|process| own.is_some() && network(&process.pid.to_string()) == own);
    (!all.is_empty()).then(|| all.swap_remove(nearest.unwrap_or(0)))
}

/// Processes of a program, by process ID.
pub(crate) fn processes(proc: &Path, program: &str) -> Vec<Process> {
    let mut found: Vec<Process> = listed(proc)
        .into_iter()
        .filter_map(|folder| {
            let pid = folder.file_name()?.to_str()?.parse().ok()?;
            let line = fs::read(folder.join("cmdline")).ok()?;
            let arguments: Vec<String> = line
                .split(|byte| *byte == 0)
                .filter(|argument| !argument.is_empty())
                .map(|argument| String::from_utf8_lossy(argument).into_owned())
                .collect();
            let name = Path::new(arguments.first()?).file_name()?.to_str()?.to_owned();
            (name == program).then_some(Process { pid, arguments })
        })
        .collect();
    found.sort_by_key(|process| process.pid);
    found
}

#[cfg(test)]
mod tests {
    use super::{super::Key, *};

    fn node(files: &[(&str, &str)]) -> (tempfile::TempDir, Options) {
        let folder = tempfile::tempdir().expect("a folder");
        for (path, text) in files {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("makes");
            fs::write(path, text).expect("writes");
        }
        let options = Options { root: folder.path().to_owned(), ..Options::default() };
        (folder, options)
    }

    #[test]
    fn the_file_is_in_the_root_directory_unless_a_flag_names_another() {
        let own = ("srv/kubelet/config.yaml", "serializeImagePulls: false\n");
        let (folder, options) = node(&[own]);
        let options = Options { root_dir: Some("/srv/kubelet".into()), ..options };
        assert_eq!(find(&options).config, folder.path().join("srv/kubelet/config.yaml"));
        assert_eq!(
            find(&options).configured(Key::Serialize).map(|value| value.text).as_deref(),
            Some("false")
        );
        let flags = "KUBELET_EXTRA_ARGS=--config=/etc/kubelet.yaml\n";
        let (folder, options) = node(&[own, ("etc/default/kubelet", flags)]);
        let options = Options { root_dir: Some("/srv/kubelet".into()), ..options };
        assert_eq!(find(&options).config, folder.path().join("etc/kubelet.yaml"));
    }

    /// O6, O7: files of kubeadm, a drop-in directory that a flag names, and flags.
    #[test]
    fn files_are_found_by_the_flags_that_name_them() {
        let (folder, options) = node(&[
            ("var/lib/kubelet/config.yaml", "serializeImagePulls: true\n"),
            (
                "var/lib/kubelet/kubeadm-flags.env",
                "KUBELET_KUBEADM_ARGS=\"--container-runtime-endpoint=unix:///a\"\n",
            ),
            ("etc/default/kubelet", "KUBELET_EXTRA_ARGS=--config-dir=/etc/kubernetes/kubelet.conf.d\n"),
            ("etc/kubernetes/kubelet.conf.d/20-b.conf", "registryPullQPS: 2\n"),
            ("etc/kubernetes/kubelet.conf.d/10-a.conf", "registryPullQPS: 1\n"),
            (
                "etc/kubernetes/kubelet.conf.d/20-a.conf/a.conf",
                "registryPullQPS: 5\nserializeImagePulls: false\n",
            ),
            ("etc/kubernetes/kubelet.conf.d/30.yaml", "registryPullQPS: 3\n"),
            ("usr/lib/systemd/system/kubelet.service.d/20-a.conf/a", ""),
            (
                "usr/lib/systemd/system/kubelet.service.d/10-kubeadm.conf",
                "[Service]\nEnvironment=\"KUBELET_CONFIG_ARGS=--config=/var/lib/kubelet/config.yaml\"\n",
            ),
        ]);
        fs::write(
            folder.path().join("usr/lib/systemd/system/kubelet.service.d/30.conf"),
            b"Environment=A=\xff\n",
        )
        .expect("writes");
        let kubelet = find(&options);
        assert_eq!(kubelet.config, folder.path().join("var/lib/kubelet/config.yaml"));
        assert_eq!(kubelet.config_dir, Some(folder.path().join("etc/kubernetes/kubelet.conf.d")));
        assert_eq!(kubelet.errors, [""; 0]);
        let value = |key| kubelet.configured(key).map(|value| value.text);
        assert_eq!(value(Key::Serialize).as_deref(), Some("false"), "a folder of the drop-in directory");
        assert_eq!(value(Key::Qps).as_deref(), Some("2"));
        assert_eq!(value(Key::RuntimeEndpoint).as_deref(), Some("unix:///a"));
        assert_eq!(kubelet.process, None);
    }

    #[test]
    fn a_running_kubelet_names_its_files() {
        let (folder, options) = node(&[
            ("proc/7/cmdline", "/usr/bin/kubelet\0--config=/etc/k.yaml\0--hostname-override=n1\0"),
            ("proc/8/cmdline", "sh\0-c\0kubelet\0"),
            ("etc/k.yaml", "registryPullQPS: 9\n"),
        ]);
        // The root of the process is that of the node.
        std::os::unix::fs::symlink(folder.path(), folder.path().join("proc/7/root")).expect("links");
        let kubelet = find(&options);
        assert_eq!(kubelet.process.as_ref().map(|process| process.pid), Some(7));
        assert_eq!(kubelet.configured(Key::Qps).map(|value| value.text).as_deref(), Some("9"));
        assert_eq!(kubelet.other("hostname-override", "").as_deref(), Some("n1"));
        fs::remove_file(folder.path().join("proc/7/root")).expect("removes");
        std::os::unix::fs::symlink("/", folder.path().join("proc/7/root")).expect("links");
        assert_eq!(find(&options).process, None, "a kubelet of another container");
    }

    #[test]
    fn of_several_kubelets_the_one_in_this_network_namespace_is_the_nodes() {
        let (folder, options) = node(&[
            ("proc/7/cmdline", "kubelet\0--hostname-override=other\0"),
            ("proc/8/cmdline", "kubelet\0--hostname-override=own\0"),
            ("proc/7/ns/net", ""),
            ("proc/self/ns/net", ""),
        ]);
        let at = |path: &str| folder.path().join("proc").join(path);
        for pid in ["7", "8"] {
            std::os::unix::fs::symlink(folder.path(), at(pid).join("root")).expect("links");
        }
        assert_eq!(
            find(&options).process.map(|process| process.pid),
            Some(7),
            "namespaces that cannot be read"
        );
        fs::create_dir(at("8/ns")).expect("makes");
        fs::hard_link(at("self/ns/net"), at("8/ns/net")).expect("links");
        assert_eq!(find(&options).process.map(|process| process.pid), Some(8));
    }

    #[test]
    fn a_node_without_a_kubelet() {
        let (_folder, options) = node(&[]);
        assert!(!find(&options).exists());
    }
}
