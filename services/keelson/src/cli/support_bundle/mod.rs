//! `keelson support-bundle`: collects what a bug report needs.
//!
//! Owns: the archive. In: settings (defaults, if they are invalid), the debug sockets of agent and proxy, the journal,
//! the kernel, `/proc`; neither agent nor proxy has to run. Out: a `.tar.gz` that only its owner can read, without secrets,
//! with a manifest of what is in it and of what could not be had.

mod collect;
mod host;
mod known;
mod manifest;
mod parts;
mod redact;

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    process::ExitCode,
    time::SystemTime,
};

use anyhow::Context as _;
use clap::Args;
use flate2::{Compression, write::GzEncoder};
use futures_util::{StreamExt as _, stream};
use keelson_config::Settings;

use self::{
    collect::{Collected, Part},
    manifest::{Entry, Manifest},
    redact::Redactor,
};
use super::format::{bytes, one_line};
use crate::{
    output::{print, print_error},
    settings::SettingsArgs,
};

/// Parts that are collected at the same time.
const PARALLEL: usize = 4;

/// Collect state, logs and settings of agent and proxy for a bug report.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    keelson support-bundle                   write keelson-support-NODE-TIME.tar.gz to the current directory\n  \
    keelson support-bundle -o - | tar -tz    list what is in a bundle\n\n\
    Run it as root. The agent and the proxy do not have to run. MANIFEST.txt in the bundle lists every part, how\n\
    long it took, and what could not be collected and why. Tokens, passwords, private keys and registry credentials\n\
    are replaced by <redacted>; names of nodes, pods, Services and images, and addresses, stay: look at it before\n\
    you send it.")]
pub(crate) struct SupportBundleArgs {
    /// File to write; it must not exist (-: standard output) [default: keelson-support-NODE-TIME.tar.gz].
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    settings: SettingsArgs,
}

pub(crate) async fn run_support_bundle(args: SupportBundleArgs) -> anyhow::Result<ExitCode> {
    let (settings, settings_error) = match args.settings.load() {
        Ok(loaded) => ((*loaded.settings).clone(), String::new()),
        Err(errors) => (Settings::default(), errors.to_string()),
    };
    let now = SystemTime::now();
    let node = node_name(&settings);
    let created = humantime::format_rfc3339_seconds(now).to_string();
    let path = args.output.clone().unwrap_or_else(|| {
        format!("keelson-support-{node}-{}.tar.gz", created.replace(['-', ':'], "")).into()
    });
    // Before anything is collected, because that takes a while.
    let file = open(&path)?;
    let settings_file = args.settings.config.as_deref().unwrap_or(Path::new(keelson_config::DEFAULT_FILE));
    let redactor = Redactor::new(known::known_secrets(&settings, settings_file));
    let mut archive = Archive::new(file, format!("keelson-support-{node}"), now);
    let mut manifest = Manifest {
        version: env!("CARGO_PKG_VERSION"),
        node: redactor.redact(&node).0,
        created,
        settings_error: redactor.redact(&settings_error).0,
        is_root: nix::unistd::geteuid().is_root(),
        parts: Vec::new(),
    };
    let mut collected = stream::iter(parts::parts(&settings, &args.settings).into_iter().map(collect_part))
        .buffered(PARALLEL);
    while let Some((file, source, collected)) = collected.next().await {
        let (text, removed) = redactor.redact(&collected.text);
        let (error, in_error) = redactor.redact(&collected.error);
        let (source, in_source) = redactor.redact(&source);
        let collected = Collected { text, ..collected };
        let written = match collected.text.is_empty() {
            true => Ok(()),
            false => archive.add(&file, collected.text.as_bytes()),
        };
        written.with_context(|| format!("cannot write {}", path.display()))?;
        manifest.parts.push(Entry::new(file, source, removed + in_error + in_source, &collected, error));
    }
    let finished = archive
        .add("MANIFEST.txt", manifest.text().as_bytes())
        .and_then(|()| archive.add("manifest.json", &serde_json::to_vec_pretty(&manifest)?))
        .and_then(|()| archive.finish());
    let written = finished.with_context(|| format!("cannot write {}", path.display()))?;
    report(&path, &manifest, written)?;
    Ok(ExitCode::SUCCESS)
}

async fn collect_part(part: Part) -> (String, String, Collected) {
    let source = part.source.to_string();
    let mut collected = collect::collect(part.source, part.timeout).await;
    collected.text = (part.keep)(&collected.text);
    (part.file, source, collected)
}

/// To standard error if the bundle goes to standard output.
fn report(path: &Path, manifest: &Manifest, written: u64) -> io::Result<()> {
    let (parts, failed) = (manifest.parts.len(), manifest.failed());
    let text = format!(
        "{}: {}, {parts} parts, {failed} not available or incomplete (see MANIFEST.txt)\n\
         Secrets are removed. Names and addresses are not: look at it before you send it.",
        path.display(),
        bytes(written)
    );
    if !manifest.is_root {
        print_error("keelson: not run as root: much cannot be read by other users");
    }
    if !manifest.settings_error.is_empty() {
        print_error(&format!("keelson: defaults are used: {}", one_line(&manifest.settings_error)));
    }
    if is_stdout(path) {
        print_error(&text);
        return Ok(());
    }
    print(&text)
}

fn is_stdout(path: &Path) -> bool {
    path == Path::new("-")
}

/// Host name or node name, as a part of a file name.
fn node_name(settings: &Settings) -> String {
    let name = match settings.agent.node_name.as_str() {
        "" => nix::unistd::gethostname().unwrap_or_default().to_string_lossy().into_owned(),
        name => name.to_owned(),
    };
    name.chars().map(|c| if c.is_ascii_alphanumeric() || matches!(c, '-' | '.') { c } else { '_' }).collect()
}

fn open(path: &Path) -> anyhow::Result<Output> {
    if is_stdout(path) {
        return Ok(Output::Stdout(io::stdout()));
    }
    let opened = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let file =
        opened.with_context(|| format!("cannot create {}; pass another path with -o", path.display()))?;
    Ok(Output::File(file))
}

enum Output {
    File(File),
    Stdout(io::Stdout),
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::File(file) => file.write(bytes),
            Self::Stdout(stdout) => stdout.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::File(file) => file.flush(),
            Self::Stdout(stdout) => stdout.flush(),
        }
    }
}

/// A writer that counts.
struct Counted<W> {
    inner: W,
    written: u64,
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.inner.write(bytes)?;
        self.written += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// A compressed archive with one folder.
struct Archive<W: Write> {
    tar: tar::Builder<GzEncoder<Counted<W>>>,
    folder: String,
    unix_seconds: u64,
}

impl<W: Write> Archive<W> {
    fn new(to: W, folder: String, now: SystemTime) -> Self {
        let since_epoch = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let counted = Counted { inner: to, written: 0 };
        let tar = tar::Builder::new(GzEncoder::new(counted, Compression::default()));
        Self { tar, folder, unix_seconds: since_epoch.as_secs() }
    }

    fn add(&mut self, file: &str, content: &[u8]) -> io::Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(self.unix_seconds);
        self.tar.append_data(&mut header, format!("{}/{file}", self.folder), content)
    }

    /// Returns the size of the archive in bytes.
    fn finish(self) -> io::Result<u64> {
        let mut counted = self.tar.into_inner()?.finish()?;
        counted.flush()?;
        Ok(counted.written)
    }
}
