//! Owns: a container runtime of the test, with root, state and socket in the test's folder: a containerd, or a CRI-O,
//! whose settings are in [`crate::crio`].
//! In: the kind of runtime, and settings that a test may change. Out: its socket, and control of its process.
//!
//! The daemon's own limit on downloads is its default, as on a node. A test that keeps more downloads waiting at the
//! registry sets it to [`MANY_DOWNLOADS`].

use crate::cri::Cri;
use crate::crio;
use crate::daemon::Daemon;
use crate::images::Image;
use crate::peers;
use crate::process::Program;
use crate::scratch::Scratch;
use anyhow::{Context as _, Result, bail};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Debian's containerd 1.6, or 1.7 in its place ([`peers::containerd_v1`]).
    Debian16,
    /// containerd 2.4, built from its Go module. Pulls through its transfer service.
    V2,
    /// CRI-O 1.34, built from its Go module. It has neither leases nor a content API.
    Crio,
}

impl Kind {
    pub const ALL: [Self; 2] = [Self::Debian16, Self::V2];
}

/// Folder of CNI plugins that only report their version, below the folder of a runtime.
pub(crate) const NETWORK_PLUGINS: &str = "cni-plugins";

/// A download limit of the daemon that no test reaches.
pub const MANY_DOWNLOADS: u32 = 50;

#[derive(Clone, Debug)]
pub struct Options {
    /// Pause image; needed only by tests that run pods.
    pub sandbox_image: Option<String>,
    /// The daemon's limit on blobs in flight: per pull in containerd 1.6, for all pulls in containerd 2.
    pub max_concurrent_downloads: u32,
    pub discard_unpacked_layers: bool,
    /// Layers pass a gate before they are unpacked: see [`Containerd::close_unpack_gate`].
    pub unpack_gate: bool,
    /// Time without a byte after which the runtime cancels a pull. Not supported by containerd 1.6.
    pub image_pull_progress_timeout: Option<String>,
    /// Registries that are reached at another address: name to `127.0.0.1:PORT`, over plain HTTP.
    pub mirrors: BTreeMap<String, String>,
    /// Writes a network configuration; without one a kubelet's node does not become ready. The plugin that it names
    /// need not be installed if every pod uses the host network.
    pub network: bool,
    /// The folder of the network's plugins (see [`peers::cni`]), for pods with addresses of [`POD_NETWORK`]. Only for [`Kind::V2`].
    pub network_plugins: Option<PathBuf>,
}

/// Addresses of pods: the first network that a controller gives to a node of `10.244.0.0/16`.
pub const POD_NETWORK: &str = "10.244.0.0/24";

impl Default for Options {
    fn default() -> Self {
        Self {
            sandbox_image: None,
            max_concurrent_downloads: 3,
            discard_unpacked_layers: false,
            unpack_gate: false,
            image_pull_progress_timeout: None,
            mirrors: BTreeMap::new(),
            network: false,
            network_plugins: None,
        }
    }
}

/// Killed on drop; its mounts are removed with the test's folder.
#[derive(Debug)]
pub struct Containerd {
    kind: Kind,
    socket: PathBuf,
    daemon: Daemon,
}

impl Containerd {
    /// Starts one below `scratch` and waits until its CRI answers.
    pub async fn start(scratch: &Scratch, kind: Kind, options: &Options) -> Result<Self> {
        Self::start_in(&scratch.numbered("c")?, kind, options).await
    }

    /// Starts one in a folder of the caller; contents of an earlier run are reused.
    pub async fn start_in(folder: &Path, kind: Kind, options: &Options) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        if options.network {
            write_network(folder, options.network_plugins.is_some())?;
        }
        let (socket, program) = match kind {
            Kind::Crio => {
                let driver = if snapshotter(folder)? == "overlayfs" { "overlay" } else { "vfs" };
                (crio::SOCKET, crio::program(folder, driver, options)?)
            }
            Kind::Debian16 => {
                ("containerd.sock", Self::program(folder, kind, options, peers::containerd_v1()?)?)
            }
            Kind::V2 => ("containerd.sock", Self::program(folder, kind, options, peers::containerd_v2()?)?),
        };
        let mut containerd = Self { kind, socket: folder.join(socket), daemon: Daemon::new(program) };
        containerd.start_again().await?;
        Ok(containerd)
    }

    fn program(folder: &Path, kind: Kind, options: &Options, path: PathBuf) -> Result<Program> {
        let config = folder.join("config.toml");
        fs::write(&config, settings(folder, kind, options)?)
            .with_context(|| format!("cannot write {}", config.display()))?;
        for (name, address) in &options.mirrors {
            write_registry_config(folder, name, address)?;
        }
        // The shim is looked up in PATH, and must be of the same version.
        let beside = path.parent().map(Path::to_owned).unwrap_or_default();
        let search = std::env::var("PATH").unwrap_or_default();
        Ok(Program {
            name: format!("containerd ({kind:?})"),
            path,
            args: vec!["--config".to_owned(), config.display().to_string()],
            env: vec![("PATH".to_owned(), format!("{}:{search}:/usr/sbin:/sbin", beside.display()))],
            log: folder.join("containerd.log"),
        })
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.socket.display())
    }

    pub async fn cri(&self) -> Result<Cri> {
        Cri::connect(&self.socket).await
    }

    /// Makes the registry `name` reached at `address` over plain HTTP, from the next pull on. For a registry on
    /// loopback the two are the same: by default, containerd 2 tries TLS there first. CRI-O reads these only at start,
    /// and others only from [`Options::mirrors`].
    pub fn configure_registry(&self, name: &str, address: &str) -> Result<()> {
        match self.kind {
            Kind::Debian16 | Kind::V2 => write_registry_config(self.folder()?, name, address),
            Kind::Crio if name == address && name.starts_with("127.0.0.1:") => Ok(()),
            Kind::Crio => bail!("CRI-O reads {name} only at its start; add it to Options::mirrors"),
        }
    }

    pub fn folder(&self) -> Result<&Path> {
        self.socket.parent().context("the socket is in a folder")
    }

    /// What PullImage returns for this image, pulled from the registry at `address`.
    pub fn reference(&self, image: &Image, address: &str) -> String {
        match self.kind {
            Kind::Debian16 | Kind::V2 => image.config.0.clone(),
            Kind::Crio => image.at_digest(address),
        }
    }

    pub fn log(&self) -> Result<String> {
        self.daemon.log()
    }

    /// The largest number of bytes that containerd has written of one unfinished blob.
    pub fn ingested(&self) -> u64 {
        let root = self.socket().with_file_name("root/io.containerd.content.v1.content/ingest");
        let entries = fs::read_dir(root).into_iter().flatten().flatten();
        let size = |entry: fs::DirEntry| Some(fs::metadata(entry.path().join("data")).ok()?.len());
        entries.filter_map(size).max().unwrap_or(0)
    }

    /// Blocks unpacking of layers. Needs [`Options::unpack_gate`].
    pub fn close_unpack_gate(&self) -> Result<()> {
        let gate = unpack_gate(self.socket.parent().context("the socket is in a folder")?);
        fs::write(&gate, "").with_context(|| format!("cannot write {}", gate.display()))
    }

    pub fn open_unpack_gate(&self) -> Result<()> {
        let gate = unpack_gate(self.socket.parent().context("the socket is in a folder")?);
        fs::remove_file(&gate).with_context(|| format!("cannot remove {}", gate.display()))
    }

    /// Sends SIGKILL to what systemd would kill: the whole control group of CRI-O, only the daemon of containerd, whose
    /// unit has `KillMode=process`. Its files stay.
    pub fn kill9(&mut self) -> Result<()> {
        match self.kind {
            Kind::Crio => self.daemon.kill9_group(),
            Kind::Debian16 | Kind::V2 => self.daemon.kill9(),
        }
    }

    pub async fn terminate(&mut self) -> Result<ExitStatus> {
        self.daemon.terminate().await
    }

    pub async fn start_again(&mut self) -> Result<()> {
        let socket = &self.socket;
        self.daemon
            .start(|| async move {
                let cri = Cri::connect(socket).await?;
                cri.fs_info().await.map(drop).context("ImageFsInfo fails")
            })
            .await
    }
}

/// The snapshotter to use below a folder: overlayfs, or native if the file system does not support overlayfs.
fn snapshotter(folder: &Path) -> Result<&'static str> {
    let place = tempfile::tempdir_in(folder).context("cannot make a folder")?;
    let part = |name| {
        let path = place.path().join(name);
        fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display())).map(|()| path)
    };
    let (lower, upper, work, merged) = (part("lower")?, part("upper")?, part("work")?, part("merged")?);
    let options =
        format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
    let mounted = mount(Some("overlay"), &merged, Some("overlay"), MsFlags::empty(), Some(options.as_str()));
    match mounted {
        Ok(()) => {
            umount2(&merged, MntFlags::MNT_DETACH).context("cannot unmount what was just mounted")?;
            Ok("overlayfs")
        }
        Err(error) => {
            eprintln!("overlayfs does not work below {} ({error}): using native", folder.display());
            Ok("native")
        }
    }
}

/// Layers wait to be unpacked while this file exists.
fn unpack_gate(folder: &Path) -> PathBuf {
    folder.join("unpack-gate-is-closed")
}

/// Stream processor configuration: containerd sends each layer through a program of the tests as it unpacks it.
fn unpack_gate_settings(folder: &Path) -> String {
    let layer = "application/vnd.oci.image.layer.v1.tar";
    let gate = unpack_gate(folder);
    format!(
        "[stream_processors.\"test.unpack-gate\"]\n  accepts = [\"{layer}\"]\n  returns = \"{layer}\"\n\
         \x20 path = \"/bin/sh\"\n  args = [\"-c\", \"while [ -e {gate} ]; do sleep 0.05; done; exec cat\"]\n",
        gate = gate.display()
    )
}

fn settings(folder: &Path, kind: Kind, options: &Options) -> Result<String> {
    let snapshotter = snapshotter(folder)?;
    let at = folder.display();
    let downloads = options.max_concurrent_downloads;
    let discard = options.discard_unpacked_layers;
    let gate = if options.unpack_gate { unpack_gate_settings(folder) } else { String::new() };
    let sandbox = options.sandbox_image.as_deref();
    let common = |version: u8| {
        format!(
            "version = {version}\nroot = \"{at}/root\"\nstate = \"{at}/state\"\n\
             [grpc]\n  address = \"{at}/containerd.sock\"\n\
             [ttrpc]\n  address = \"{at}/containerd.sock.ttrpc\"\n\
             [plugins.\"io.containerd.internal.v1.opt\"]\n  path = \"{at}/opt\"\n{gate}"
        )
    };
    let sandbox_line =
        |key: &str| sandbox.map(|image| format!("  {key} = \"{image}\"\n")).unwrap_or_default();
    Ok(match kind {
        Kind::Crio => bail!("CRI-O has settings of another kind"),
        Kind::Debian16 => {
            let cri = "io.containerd.grpc.v1.cri";
            format!(
                "{common}[plugins.\"{cri}\"]\n  restrict_oom_score_adj = true\n  max_concurrent_downloads = {downloads}\n\
                 {sandbox}  [plugins.\"{cri}\".containerd]\n    snapshotter = \"{snapshotter}\"\n\
                 \x20   discard_unpacked_layers = {discard}\n\
                 \x20 [plugins.\"{cri}\".registry]\n    config_path = \"{at}/certs.d\"\n\
                 \x20 [plugins.\"{cri}\".cni]\n    bin_dir = \"/usr/lib/cni\"\n    conf_dir = \"{at}/cni\"\n",
                common = common(2),
                sandbox = sandbox_line("sandbox_image"),
            )
        }
        Kind::V2 => {
            let images = "io.containerd.cri.v1.images";
            let runtime = "io.containerd.cri.v1.runtime";
            let progress = options.image_pull_progress_timeout.as_ref();
            // `max_concurrent_downloads` of the CRI plugin must stay as it is: any other value makes it use the old
            // path instead of the transfer service.
            format!(
                "{common}[plugins.\"io.containerd.transfer.v1.local\"]\n  max_concurrent_downloads = {downloads}\n\
                 [plugins.\"io.containerd.nri.v1.nri\"]\n  disable = true\n\
                 [plugins.\"{images}\"]\n  snapshotter = \"{snapshotter}\"\n{discard}{progress}\
                 \x20 [plugins.\"{images}\".registry]\n    config_path = \"{at}/certs.d\"\n{pinned}\
                 [plugins.\"{runtime}\"]\n  restrict_oom_score_adj = true\n\
                 \x20 [plugins.\"{runtime}\".cni]\n    bin_dirs = [\"{plugins}\"]\n    conf_dir = \"{at}/cni\"\n",
                common = common(3),
                plugins = options.network_plugins.as_deref().unwrap_or(Path::new("/usr/lib/cni")).display(),
                // Any value but the default also makes it use the old path.
                discard = if discard { "  discard_unpacked_layers = true\n" } else { "" },
                progress = progress
                    .map(|t| format!("  image_pull_progress_timeout = \"{t}\"\n"))
                    .unwrap_or_default(),
                pinned = sandbox
                    .map(|_| format!("  [plugins.\"{images}\".pinned_images]\n  {}", sandbox_line("sandbox")))
                    .unwrap_or_default(),
            )
        }
    })
}

fn write_network(folder: &Path, works: bool) -> Result<()> {
    let place = folder.join("cni");
    fs::create_dir_all(&place).with_context(|| format!("cannot make {}", place.display()))?;
    // A route per pod: replies between pods of a bridge pass by the rules of the node only where bridges call netfilter.
    let kind = if works { "ptp" } else { "bridge" };
    let addresses = folder.join("cni-addresses");
    let network = format!(
        "{{\"cniVersion\": \"0.4.0\", \"name\": \"test\", \"plugins\": [{{\"type\": \"{kind}\", \"ipam\": \
         {{\"type\": \"host-local\", \"subnet\": \"{POD_NETWORK}\", \"dataDir\": \"{}\", \"routes\": [{{\"dst\": \
         \"0.0.0.0/0\"}}]}}}}]}}\n",
        addresses.display()
    );
    fs::write(place.join("10-test.conflist"), network).context("cannot write the network configuration")?;
    // CRI-O asks every plugin for its version before it treats a network as configured.
    let plugins = folder.join(NETWORK_PLUGINS);
    fs::create_dir_all(&plugins).with_context(|| format!("cannot make {}", plugins.display()))?;
    let plugin = plugins.join("bridge");
    let answer = "{\"cniVersion\": \"0.4.0\", \"supportedVersions\": [\"0.4.0\"]}";
    fs::write(&plugin, format!("#!/bin/sh\necho '{answer}'\n"))
        .and_then(|()| fs::set_permissions(&plugin, Permissions::from_mode(0o755)))
        .with_context(|| format!("cannot write {}", plugin.display()))
}

fn write_registry_config(folder: &Path, name: &str, address: &str) -> Result<()> {
    let place = folder.join("certs.d").join(name);
    fs::create_dir_all(&place).with_context(|| format!("cannot make {}", place.display()))?;
    let hosts = format!(
        "server = \"http://{address}\"\n[host.\"http://{address}\"]\n  capabilities = [\"pull\", \"resolve\"]\n"
    );
    fs::write(place.join("hosts.toml"), hosts).context("cannot write hosts.toml")
}
