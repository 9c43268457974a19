//! A virtual machine that boots Debian with systemd.
//!
//! Owns: QEMU's process and the VM's disk, an overlay of the one that `root.sh` makes. In: a folder for `/mnt/tools`, commands.
//! Out: their output; a VM that is off, also after a power cut.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use tempfile::TempDir;

use crate::guest::{Guest, Output};

/// An emulated boot takes one to two minutes on an idle machine.
const BOOT: Duration = Duration::from_secs(600);
const COMMAND: Duration = Duration::from_secs(300);

#[derive(Debug)]
pub(crate) struct Vm {
    root: PathBuf,
    folder: TempDir,
    qemu: Option<Child>,
    guest: Guest,
}

impl Vm {
    /// Makes the disks. `tools`: what the VM has at `/mnt/tools`.
    pub(crate) fn create(tools: &Path) -> Result<Self> {
        let root = output(&mut Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("root.sh")))?;
        let root = PathBuf::from(root.trim());
        let folder = tempfile::Builder::new().prefix("keelson-boot-").tempdir()?;
        let disk = folder.path().join("disk.qcow2");
        output(
            Command::new("qemu-img")
                .args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"])
                .args([&root.join("root.ext4"), &disk]),
        )?;
        let mut format = Command::new("mke2fs");
        format
            .args(["-q", "-t", "ext4", "-L", "tools", "-d"])
            .args([tools, &folder.path().join("tools.ext4")]);
        output(format.arg("768M"))?;
        let guest = Guest { socket: folder.path().join("guest.sock") };
        Ok(Self { root, folder, qemu: None, guest })
    }

    /// Starts it, and waits until systemd has started what it starts.
    pub(crate) fn power_on(&mut self) -> Result<()> {
        ensure!(self.qemu.is_none(), "the VM is on");
        let drive = |file: &str, format: &str| {
            format!("file={},format={format},if=virtio", self.folder.path().join(file).display())
        };
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(
            "-accel tcg,thread=multi -cpu qemu64 -smp 2 -m 1536 -machine pc -nodefaults -no-user-config"
                .split(' '),
        )
        .args(["-display", "none", "-nic", "user,model=virtio-net-pci"])
        .args(["-serial", &format!("file:{}", self.console().display())])
        .args(["-drive", &drive("disk.qcow2", "qcow2")])
        .args(["-drive", &format!("{},readonly=on", drive("tools.ext4", "raw"))])
        .args(["-device", "virtio-serial"])
        .args([
            "-chardev",
            &format!("socket,server=on,wait=off,id=guest,path={}", self.guest.socket.display()),
        ])
        .args(["-device", "virtserialport,chardev=guest,name=org.qemu.guest_agent.0"])
        .arg("-kernel")
        .arg(self.root.join("vmlinuz"))
        .arg("-initrd")
        .arg(self.root.join("initrd.img"))
        .args(["-append", APPEND]);
        let log = File::create(self.folder.path().join("qemu.log"))?;
        qemu.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.qemu = Some(qemu.spawn().context("cannot start qemu-system-x86_64")?);
        self.wait_until_up("")
    }

    /// As if its plug were pulled. What was not written to the disk is gone.
    pub(crate) fn cut_power(&mut self) -> Result<()> {
        let mut qemu = self.qemu.take().context("the VM is off")?;
        qemu.kill()?;
        qemu.wait()?;
        Ok(())
    }

    pub(crate) fn reboot(&mut self) -> Result<()> {
        let boot = self.boot_id()?;
        self.guest.start("systemctl reboot")?;
        self.wait_until_up(&boot)
    }

    fn boot_id(&self) -> Result<String> {
        self.bash("cat /proc/sys/kernel/random/boot_id")
    }

    /// `former`: the boot ID that it must not have any more.
    fn wait_until_up(&mut self, former: &str) -> Result<()> {
        let deadline = Instant::now() + BOOT;
        let wait = "systemctl is-system-running --wait; mountpoint -q /mnt || mount -o ro LABEL=tools /mnt";
        loop {
            if let Some(ended) = self.qemu.as_mut().context("the VM is off")?.try_wait()? {
                bail!("qemu ended ({ended}): {}", tail(&self.folder.path().join("qemu.log")));
            }
            if self.guest.is_up(Duration::from_secs(5))
                && self.boot_id().is_ok_and(|boot| boot != former)
                && self.guest.bash(wait, BOOT).is_ok_and(|output| output.code == 0)
            {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "the VM did not boot: {}", tail(&self.console()));
            thread::sleep(Duration::from_secs(1));
        }
    }

    pub(crate) fn console(&self) -> PathBuf {
        self.folder.path().join("console")
    }

    /// Runs a script with `set -e`, which must succeed; its output.
    pub(crate) fn bash(&self, script: &str) -> Result<String> {
        let output = self.attempt(script)?;
        if output.code != 0 {
            bail!("exit code {}: {}\n{}{}", output.code, script.trim(), output.stdout, output.stderr);
        }
        Ok(output.stdout)
    }

    pub(crate) fn attempt(&self, script: &str) -> Result<Output> {
        self.guest.bash(&format!("set -euo pipefail\n{script}"), COMMAND)
    }

    /// Waits until a condition of bash holds.
    pub(crate) fn wait_for(&self, condition: &str) -> Result<()> {
        let script =
            format!("for _ in $(seq 240); do if {condition}; then exit 0; fi; sleep 0.5; done; exit 1");
        let output = self.guest.bash(&script, COMMAND)?;
        ensure!(output.code == 0, "does not come true: {condition}\n{}", output.stderr);
        Ok(())
    }

    /// Starts a program as the unit `name`, in place of a former one, with its output in `/run/NAME.out`.
    pub(crate) fn start(&self, name: &str, command: &str) -> Result<()> {
        let former = format!(
            "systemctl stop {name} 2>/dev/null || true; systemctl reset-failed {name} 2>/dev/null || true"
        );
        let output = format!("-p StandardOutput=truncate:/run/{name}.out -p StandardError=inherit");
        self.bash(&format!("{former}; systemd-run --quiet --unit={name} {output} {command}")).map(drop)
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        if let Some(qemu) = &mut self.qemu {
            let _killed = qemu.kill();
            let _ended = qemu.wait();
        }
    }
}

const APPEND: &str = "root=LABEL=root rw console=ttyS0 quiet mitigations=off nokaslr tsc=reliable no_timer_check \
    rcupdate.rcu_cpu_stall_suppress=1";

fn tail(file: &Path) -> String {
    let text = fs::read(file).unwrap_or_default();
    String::from_utf8_lossy(&text[text.len().saturating_sub(2_000)..]).into_owned()
}

fn output(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.with_context(|| format!("cannot start {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", output.status);
    Ok(String::from_utf8(output.stdout)?)
}
