//! The commands of the documentation, run as they are written.
//!
//! Every `sh` block of the documents in [`INSTALL`], [`KUBEADM`] and [`PULLS`] runs on a stand-in of a node ([`node`]), in the
//! order of the documents, against a real API server with what kubeadm puts into it; or it is in [`NOT_RUN`] with the reason. A
//! `text` block that follows is what it prints: its lines are looked for in order, and `...` stands for anything.

mod blocks;
mod kubeadm;
mod node;

use anyhow::{Result, ensure};
use blocks::{Block, blocks};
use node::Node;

/// In the order in which a user runs them.
const INSTALL: [&str; 2] = ["docs/install.md", "docs/upgrade-rollback-uninstall.md"];
const KUBEADM: &str = "docs/kubeadm.md";
const PULLS: &str = "docs/pulls.md";

/// Blocks that are not run, by a part of their first line.
const NOT_RUN: [(&str, &str); 1] = [(
    "kubeadm upgrade apply",
    "needs a control plane that kubeadm made, as pods; that the phase exists is a test of its own",
)];

fn is_run(block: &Block) -> bool {
    !NOT_RUN.iter().any(|(part, _)| block.code.lines().next().is_some_and(|line| line.contains(part)))
}

#[tokio::test(flavor = "multi_thread")]
async fn install_upgrade_and_uninstall_as_written() -> Result<()> {
    let node = Node::start().await?;
    let mut all = Vec::new();
    for document in INSTALL {
        all.extend(blocks(document)?.into_iter().filter(is_run));
    }
    node.run(&all).await?.check(&all)
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_of_kubeadm_as_written() -> Result<()> {
    let node = Node::start().await?;
    let mut all = vec![Block::own(kubeadm::INSTALL, "")];
    for block in blocks(KUBEADM)?.into_iter().filter(is_run) {
        // The two ways are alternatives.
        if block.code.contains("/patches") {
            all.push(Block::own("keelson bypass\nrm /etc/default/kubelet\n", ""));
        }
        all.push(block);
    }
    node.run(&all).await?.check(&all)
}

/// What a bypass does, without the program: from the configuration file and flags, and from a drop-in directory.
#[tokio::test(flavor = "multi_thread")]
async fn taking_the_agent_out_by_hand_as_written() -> Result<()> {
    let node = Node::start().await?;
    let by_hand = blocks(PULLS)?;
    ensure!(
        by_hand.iter().any(|block| block.code.contains(".before-keelson")),
        "pulls.md restores the copies"
    );
    let mut all = vec![Block::own(kubeadm::INSTALL, "")];
    for (before, attached) in [
        (
            "echo 'KUBELET_EXTRA_ARGS=--registry-qps=3' > /etc/default/kubelet\n",
            "grep cri.sock /var/lib/kubelet/config.yaml\nif grep registry-qps=3 /etc/default/kubelet; then exit 1; fi\n",
        ),
        (
            "mkdir -p /etc/kubernetes/kubelet.conf.d\n\
             echo 'KUBELET_EXTRA_ARGS=--config-dir=/etc/kubernetes/kubelet.conf.d' > /etc/default/kubelet\n",
            "grep cri.sock /etc/kubernetes/kubelet.conf.d/20-keelson.conf\n",
        ),
    ] {
        let saved = "mkdir -p /run/saved\ncp /var/lib/kubelet/config.yaml /var/lib/kubelet/kubeadm-flags.env /etc/default/kubelet /run/saved\n";
        all.push(Block::own(&format!("{before}{saved}keelson attach\n{attached}"), ""));
        all.push(Block::own("mv /usr/bin/keelson /run/keelson.away\n", ""));
        all.extend(by_hand.iter().cloned());
        all.push(Block::own(
            "cmp /run/saved/config.yaml /var/lib/kubelet/config.yaml\n\
             cmp /run/saved/kubeadm-flags.env /var/lib/kubelet/kubeadm-flags.env\n\
             cmp /run/saved/kubelet /etc/default/kubelet\n\
             [ -z \"$(find /var/lib/kubelet /etc/default /etc/kubernetes/kubelet.conf.d -name '*keelson*')\" ]\n\
             mv /run/keelson.away /usr/bin/keelson\nkeelson bypass\n",
            "the agent is not in the image path; nothing to change\n",
        ));
    }
    node.run(&all).await?.check(&all)
}

#[test]
fn every_block_says_where_it_runs_and_every_exception_is_used() -> Result<()> {
    let mut all = blocks(KUBEADM)?;
    for document in INSTALL.into_iter().chain([PULLS]) {
        all.extend(blocks(document)?);
    }
    for block in &all {
        ensure!(block.place.is_some(), "{}: neither **Node** nor **Admin host** before it", block.name());
    }
    for (part, reason) in NOT_RUN {
        let is_used =
            all.iter().any(|block| block.code.lines().next().is_some_and(|line| line.contains(part)));
        ensure!(is_used, "no block begins with {part:?}, which is not run because it {reason}");
    }
    Ok(())
}
