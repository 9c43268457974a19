//! What the cases ask of the node.
//!
//! Owns: the VM. In: questions and orders. Out: answers of systemd and of Keelson.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};

use crate::vm::Vm;

/// Calls the CRI socket as the kubelet does.
pub(crate) const DRIVER: &str = "/mnt/cri-driver --endpoint unix:///run/keelson/cri.sock --timeout 5m --logtostderr=false --alsologtostderr=false";
/// Number of images of the registry, and of the pulls under way.
pub(crate) const IMAGES: usize = 8;

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) vm: Vm,
    /// On this machine.
    pub(crate) kubectl: PathBuf,
    /// The directory for reports, on this machine.
    pub(crate) out: PathBuf,
}

impl Node {
    pub(crate) fn new(vm: Vm, kubectl: PathBuf, out: PathBuf) -> Self {
        Self { vm, kubectl, out }
    }

    pub(crate) fn bash(&self, script: &str) -> Result<String> {
        self.vm.bash(script).map(|text| text.trim().to_owned())
    }

    /// A property of the unit of the agent.
    pub(crate) fn show(&self, property: &str) -> Result<String> {
        self.bash(&format!("systemctl show keelson.service --property={property} --value"))
    }

    pub(crate) fn main_pid(&self) -> Result<u32> {
        self.show("MainPID")?.parse().context("MainPID")
    }

    /// The process ID of the newest agent.
    pub(crate) fn agent(&self) -> Result<u32> {
        self.bash("pgrep -nf '^/usr/bin/keelson agent'")?.parse().context("no agent runs")
    }

    /// Does something after which systemd has another main process.
    pub(crate) fn replace(&self, order: &str) -> Result<()> {
        let former = self.main_pid()?;
        self.bash(order)?;
        self.vm
            // In one answer: the former process may still be the main one of an active unit while another question is asked.
            .wait_for(&format!(
                "systemctl show keelson.service -p ActiveState -p MainPID | paste -sd ' ' \
                 | grep -Ev 'MainPID=(0|{former})( |$)' | grep -q ActiveState=active"
            ))
            .with_context(|| format!("after {order:?}"))
    }

    pub(crate) fn start_registry(&self) -> Result<()> {
        self.bash("mkdir -p /run/registry && rm -f /run/registry/open /run/registry/sent")?;
        self.vm.start("registry", &format!("python3 /mnt/node/registry.py 5999 {IMAGES} /run/registry"))?;
        self.vm.wait_for("curl -sfo /dev/null http://127.0.0.1:5999/v2/")
    }

    /// Pulls every image at once, each by a caller of its own. The registry holds the layers back. Images of an earlier case are removed.
    pub(crate) fn start_pulls(&self) -> Result<()> {
        self.bash("ctr -n k8s.io images ls -q | xargs -r ctr -n k8s.io images rm --sync > /dev/null")?;
        let images: Vec<String> = (0..IMAGES).map(|n| format!("127.0.0.1:5999/image{n}:latest")).collect();
        let pulls = format!("{DRIVER} pulls --timeout 30m --clients {IMAGES} {}", images.join(" "));
        self.vm.start("pulls", &pulls)?;
        self.vm
            .wait_for("keelson pulls -o json | grep -Eq '\"running\": ?3[,}]?'")
            .context("three pulls do not run")
    }

    /// Lets the registry send, and returns when all pulls have succeeded.
    pub(crate) fn finish_pulls(&self) -> Result<()> {
        self.bash("touch /run/registry/open")?;
        self.vm.wait_for("[ $(systemctl is-active pulls) != active ]")?;
        let result = self.bash("cat /run/pulls.out")?;
        ensure!(
            result.contains("\"ok\":true") && !result.contains("\"ok\":false"),
            "a pull failed: {result}"
        );
        let twice = self.bash("sort /run/registry/sent | uniq -d")?;
        ensure!(twice.is_empty(), "layers were sent twice: {twice}");
        Ok(())
    }

    /// Calls without a pause, until [`Self::finish_load`].
    pub(crate) fn start_load(&self) -> Result<()> {
        let load = "while [ ! -e /run/load.stop ]; do sleep 0.2; done";
        self.bash("rm -f /run/load.stop")?;
        let command = format!("{load} | {DRIVER} load --rate 20 --clients 2 127.0.0.1:5999/image0:latest");
        self.vm.start("load", &format!("bash -c {command:?}"))?;
        self.vm.wait_for("grep -q started /run/load.out")
    }

    /// The number of calls, none of which failed.
    pub(crate) fn finish_load(&self) -> Result<String> {
        self.bash("touch /run/load.stop")?;
        self.vm.wait_for("[ $(systemctl is-active load) != active ]")?;
        let result = self.bash("tail -n 1 /run/load.out")?;
        ensure!(result.contains("\"failed\":0"), "calls failed: {}", self.bash("head -n 20 /run/load.out")?);
        let calls = result.split("\"calls\":").nth(1).and_then(|rest| rest.split([',', '}']).next());
        Ok(calls.with_context(|| format!("no number of calls: {result}"))?.to_owned())
    }

    /// What a person would look at first, for a case that failed.
    pub(crate) fn logs(&self) -> String {
        let script = "journalctl --no-pager -n 600 -u keelson.service -u keelson-proxy.service -u 'keelson-*.socket'; \
            systemctl --no-pager --failed; tail -n 20 /run/*.out; \
            journalctl --no-pager -n 40 -u kubelet.service; journalctl --no-pager -n 20 -u containerd.service; \
            ip address; ip route; keelson proxy state; timeout 30 python3 /mnt/node/client.py once";
        match self.vm.attempt(script) {
            Ok(output) => output.stdout + &output.stderr,
            Err(error) => format!("no logs: {error:#}"),
        }
    }
}
