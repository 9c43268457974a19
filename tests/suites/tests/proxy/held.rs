//! Owns: a table that the proxy may not change. In: a world, a family. Out: an empty table with the proxy's name and
//! another owner, so that the kernel refuses every transaction on it; removed on drop.

use anyhow::{Context as _, Result, bail};
use keelson_cluster::net::{Family, World};
use keelson_harness::peers;
use keelson_harness::util::until;
use std::io::Write as _;
use std::process::{Child, Command, Stdio};

/// A table with another owner: an `nft -i` holds it for as long as it runs.
pub(crate) struct HeldTable {
    nft: Child,
}

impl HeldTable {
    /// Replaces the table by an empty one.
    pub(crate) async fn take(world: &World, table: &str, family: Family) -> Result<Self> {
        let kind = if family == Family::V4 { "ip" } else { "ip6" };
        let mut command = Command::new(peers::system("ip", "iproute2")?);
        let nft = peers::system("nft", "nftables")?;
        command.args(["netns", "exec", world.node().name()]).arg(nft).arg("-i");
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut held = Self { nft: command.spawn().context("cannot start nft")? };
        let stdin = held.nft.stdin.as_mut().context("a piped stdin is there")?;
        // One line is one transaction: no other commit comes in between.
        writeln!(stdin, "delete table {kind} {table}; add table {kind} {table} {{ flags owner; }};")?;
        stdin.flush()?;
        let listed = || world.node().nft(&["list", "table", kind, table]).unwrap_or_default();
        until("the table is held", || listed().contains("owner")).await?;
        if held.nft.try_wait()?.is_some() {
            bail!("nft does not hold a table");
        }
        Ok(held)
    }
}

impl Drop for HeldTable {
    fn drop(&mut self) {
        // Removes the table too. An error means that it has exited already.
        let _ = self.nft.kill();
        let _ = self.nft.wait();
    }
}
