//! Owns: a small file system of the test, on a loop device. In: its size and mount point.
//! Out: a full disk and a disk that does not answer; both are always undone.

use anyhow::{Context as _, Result, bail, ensure};
use nix::fcntl::posix_fallocate;
use nix::mount::{MsFlags, mount};
use nix::sys::statvfs::statvfs;
use std::fs::{self, File};
use std::io::{ErrorKind, Read as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// An ext4 file system in a file. Unmounted on drop, which frees the loop device.
#[derive(Debug)]
pub struct LoopDisk {
    mounted_at: PathBuf,
}

impl LoopDisk {
    /// Makes an ext4 file system of `bytes` in the file `image` and mounts it at `at`, which is created.
    pub fn mount(image: &Path, at: &Path, bytes: u64) -> Result<Self> {
        let file = File::create(image).with_context(|| format!("cannot create {}", image.display()))?;
        file.set_len(bytes).with_context(|| format!("cannot resize {}", image.display()))?;
        fs::create_dir_all(at).with_context(|| format!("cannot create {}", at.display()))?;
        run("mke2fs", &["-q", "-F", "-t", "ext4", "-m", "0"], &[image])?;
        run("mount", &["-o", "loop"], &[image, at])?;
        Ok(Self { mounted_at: at.to_owned() })
    }

    pub fn path(&self) -> &Path {
        &self.mounted_at
    }

    /// Bytes that can still be written.
    pub fn available(&self) -> Result<u64> {
        let stat = statvfs(&self.mounted_at)
            .with_context(|| format!("cannot get the free space of {}", self.mounted_at.display()))?;
        Ok(stat.blocks_available() * stat.fragment_size())
    }

    /// Bytes for files, used or not.
    pub fn capacity(&self) -> Result<u64> {
        let stat = statvfs(&self.mounted_at)
            .with_context(|| format!("cannot get the size of {}", self.mounted_at.display()))?;
        Ok(stat.blocks() * stat.fragment_size())
    }

    /// Fills all but `left` bytes until the guard is dropped.
    pub fn fill(&self, left: u64) -> Result<Filler> {
        let path = self.mounted_at.join("filler");
        let file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        let filler = Filler { path };
        let wanted = self.available()?.saturating_sub(left);
        if wanted > 0 {
            // ENOSPC: another writer was faster, and the disk is full as wanted.
            match posix_fallocate(&file, 0, i64::try_from(wanted)?) {
                Ok(()) | Err(nix::errno::Errno::ENOSPC) => {}
                Err(error) => return Err(error).context("cannot fill the disk"),
            }
        }
        Ok(filler)
    }

    /// Blocks every write for `time`. A separate process thaws the disk, even if this one is killed meanwhile.
    pub async fn freeze(&self, time: Duration) -> Result<()> {
        let script = "fsfreeze --freeze \"$0\" && { sleep \"$1\"; fsfreeze --unfreeze \"$0\"; }";
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(&self.mounted_at).arg(format!("{:.3}", time.as_secs_f64()));
        command.stdin(Stdio::null()).process_group(0);
        let mut frozen = tokio::process::Command::from(command).spawn().context("cannot run fsfreeze")?;
        let status = frozen.wait().await.context("cannot wait for fsfreeze")?;
        ensure!(status.success(), "fsfreeze of {} ended with {status}", self.mounted_at.display());
        Ok(())
    }

    /// Blocks every write until the guard is dropped. A separate process thaws the disk, even if this one is killed.
    pub fn freeze_until_dropped(&self) -> Result<Frozen> {
        let script = "fsfreeze --freeze \"$0\" && { echo; cat; fsfreeze --unfreeze \"$0\"; }";
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(&self.mounted_at).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut frozen = Frozen(command.process_group(0).spawn().context("cannot run fsfreeze")?);
        let mut says = frozen.0.stdout.take().context("it has an output")?;
        says.read_exact(&mut [0]).with_context(|| format!("cannot freeze {}", self.mounted_at.display()))?;
        Ok(frozen)
    }
}

/// Thawed on drop, which waits for that.
#[derive(Debug)]
pub struct Frozen(Child);

impl Drop for Frozen {
    fn drop(&mut self) {
        // Closes its input; then the `cat` exits and the disk is thawed.
        drop(self.0.stdin.take());
        match self.0.wait() {
            Ok(status) if status.success() => {}
            ended => eprintln!("cannot thaw the disk: {ended:?}"),
        }
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        // Lazily: the owner of the folder ends what still runs on it.
        if let Err(error) = run("umount", &["--lazy"], &[&self.mounted_at]) {
            eprintln!("{error:#}");
        }
    }
}

/// Freed on drop.
#[derive(Debug)]
pub struct Filler {
    path: PathBuf,
}

impl Drop for Filler {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path)
            && error.kind() != ErrorKind::NotFound
        {
            eprintln!("cannot remove {}: {error}", self.path.display());
        }
    }
}

/// Mounts a tmpfs of `size` bytes (such as `32m`) on a folder, which is created; [`crate::scratch::Scratch`] unmounts it.
pub fn mount_tmpfs(at: &Path, size: &str) -> Result<()> {
    fs::create_dir_all(at)?;
    let options = format!("size={size}");
    mount(Some("tmpfs"), at, Some("tmpfs"), MsFlags::empty(), Some(options.as_str())).context("cannot mount")
}

/// Writes a file until the disk is full, and returns the file.
pub fn fill_up(disk: &Path) -> Result<PathBuf> {
    let ballast = disk.join("ballast");
    match fs::write(&ballast, vec![1; 128 << 20]) {
        Err(error) if error.kind() == ErrorKind::StorageFull => Ok(ballast),
        other => bail!("the disk is not full: {other:?}"),
    }
}

fn run(program: &str, args: &[&str], paths: &[&Path]) -> Result<()> {
    // System programs are not in everyone's PATH.
    let search = std::env::var("PATH").unwrap_or_default();
    let output = Command::new(program)
        .args(args)
        .args(paths)
        .env("PATH", format!("{search}:/usr/sbin:/sbin"))
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    ensure!(
        output.status.success(),
        "{program} {paths:?} ended with {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
