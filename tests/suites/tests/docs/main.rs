//! The commands of the documentation, run as they are written.
//!
//! Every `sh` block of the documents in [`DOCUMENTS`] runs on a stand-in of a node ([`node`]), in the order of the documents,
//! against a real API server with what kubeadm puts into it; or it is in [`NOT_RUN`] with the reason. A `text` block that
//! follows is what it prints: its lines are looked for in order, and `...` stands for anything.

mod blocks;
mod kubeadm;
mod node;

use anyhow::{Result, ensure};
use blocks::{Block, blocks};
use node::Node;

/// In the order in which a user runs them.
const INSTALL: [&str; 2] = ["docs/install.md", "docs/upgrade-rollback-uninstall.md"];
const KUBEADM: &str = "docs/kubeadm.md";

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

#[test]
fn every_block_says_where_it_runs_and_every_exception_is_used() -> Result<()> {
    let mut all = blocks(KUBEADM)?;
    for document in INSTALL {
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
