//! Credentials that are replaced on disk while the agent runs, and those that become invalid.

use crate::common::{Role, TestEnv, eventually_slow, on_cluster, quick, sleep_seconds, within};
use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::ServiceAccount;
use keelson_cluster::kube::Cluster;
use kube::Api;
use kube::api::DeleteParams;
use std::fs;
use std::time::Duration;

#[test]
fn expiring_credentials_are_reloaded_from_disk_without_a_restart() -> Result<()> {
    on_cluster(async |cluster| {
        let (token, certificate) =
            tokio::join!(token_of_a_recreated_account(cluster), certificate_that_expires(cluster));
        token.context("token").and(certificate.context("certificate"))
    })
}

/// The old token is invalid from then on.
async fn token_of_a_recreated_account(cluster: &Cluster) -> Result<()> {
    let mut env = TestEnv::reporting(cluster, "token", Role::Companion, quick()).await?;
    // Both are valid: no effect.
    env.identity.rotate().await?;
    env.wait_for_renewals(cluster, 3).await?;
    env.wait_until_healthy().await?;

    let accounts: Api<ServiceAccount> = Api::namespaced(cluster.admin.client(), "kube-system");
    accounts.delete("token", &DeleteParams::default()).await.context("cannot delete the account")?;
    cluster.admin.ensure_service_account("kube-system", "token").await?;
    env.wait_until_failing("credentials are rejected").await?;
    let failures = env.metric("keelson_lease_renewals_total{result=\"Unauthorized\"}").await?;
    sleep_seconds(5).await;
    let more = env.metric("keelson_lease_renewals_total{result=\"Unauthorized\"}").await? - failures;
    within("renewals with a bad token in 5 s", more, 1.0, 12.0)?;

    env.identity.rotate().await?;
    env.wait_for_renewals(cluster, 2).await?;
    env.wait_until_healthy().await
}

#[test]
fn an_invalid_token_file_leaves_the_last_valid_token_in_use() -> Result<()> {
    on_cluster(async |cluster| {
        let env = TestEnv::reporting(cluster, "spoilt", Role::Companion, quick()).await?;
        let file = env.identity.credential_file();
        let token = fs::read_to_string(&file)?;
        fs::write(&file, "")?;
        let named = file.display().to_string();
        eventually_slow("the file is named", || async {
            let ready = env.readyz().await?.text();
            let wrong = ready
                .lines()
                .find(|line| line.starts_with("[-]credentials"))
                .context("everything is healthy")?;
            ensure!(wrong.contains(&named), "{ready}");
            let node = env.agent.output(&["node"]).await?;
            ensure!(node.contains(&named), "{node}");
            Ok(())
        })
        .await?;
        let renewals = env.renewals(cluster)?;
        env.wait_for_renewals(cluster, 3).await?;
        ensure!(env.renewals(cluster)? >= renewals + 3, "renewals have ended");
        // No part of it is in any output.
        let message = format!(
            "{}{}{}",
            env.agent.log()?,
            env.readyz().await?.text(),
            env.agent.output(&["node"]).await?
        );
        ensure!(!message.contains(token.trim()), "the token was shown");
        fs::write(&file, &token)?;
        env.wait_until_healthy().await
    })
}

async fn certificate_that_expires(cluster: &Cluster) -> Result<()> {
    let mut env = TestEnv::new(cluster, "certificate", Role::Node, quick()).await?;
    env.identity.rotate_for(Duration::from_secs(15))?;
    env.agent.start_again().await?;
    env.settled(cluster).await?;
    env.wait_until_failing("cannot renew Lease").await?;
    let refused = env.metric("keelson_lease_renewals_total{result=\"Unauthorized\"}").await?
        + env.metric("keelson_lease_renewals_total{result=\"Unreachable\"}").await?;
    ensure!(refused >= 1.0, "no renewal was refused");
    let renewals = env.renewals(cluster)?;
    sleep_seconds(2).await;
    assert_eq!(env.renewals(cluster)?, renewals, "an expired certificate is of use");

    env.identity.rotate().await?;
    env.wait_for_renewals(cluster, 2).await?;
    env.wait_until_healthy().await?;
    // Rotated before its end, as usual: no effect.
    env.identity.rotate().await?;
    env.wait_for_renewals(cluster, 3).await?;
    env.wait_until_healthy().await
}
