//! The commands of the documentation, run as they are written.
//!
//! Every command in an `sh` block of any document runs in one of the tests here ([`stories`]), on a stand-in of a node ([`node`])
//! against a real API server with what kubeadm puts into it, or where [`stories`] says. A `text` block that follows is what it
//! prints: its lines are looked for in order, and `...` stands for anything.

mod kubeadm;
mod node;
mod operation;
mod output;
mod release;
mod stories;

use anyhow::{Result, ensure};
use keelson_harness::documents::Block;
use node::Node;
use operation::Cgroup;
use stories::{Story, blocks_of};

#[tokio::test(flavor = "multi_thread")]
async fn install_upgrade_and_uninstall_as_written() -> Result<()> {
    let node = Node::start().await?;
    let all = blocks_of(Story::Installation)?;
    node.run(&all).await?.check(&all)
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_of_kubeadm_as_written() -> Result<()> {
    let node = Node::start().await?;
    let mut all = vec![Block::own(kubeadm::INSTALL, "")];
    for block in blocks_of(Story::Kubeadm)? {
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
    let node = Node::alone()?;
    let by_hand = blocks_of(Story::ByHand)?;
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

#[tokio::test(flavor = "multi_thread")]
async fn operation_as_written() -> Result<()> {
    let node = Node::start().await?;
    let cgroup = Cgroup::new()?;
    let all = operation::blocks(&cgroup)?;
    node.run(&all).await?.check(&all)
}

#[test]
fn every_block_of_an_installation_says_where_it_runs() -> Result<()> {
    for story in [Story::Installation, Story::Kubeadm, Story::ByHand] {
        for block in blocks_of(story)? {
            ensure!(block.place.is_some(), "{}: neither **Node** nor **Admin host** before it", block.name());
        }
    }
    Ok(())
}
