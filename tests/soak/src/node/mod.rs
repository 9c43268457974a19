//! The soak of a whole cluster of one node: Keelson as the agent in the path of image pulls, and, installed from the chart, in
//! kube-proxy's place.
//!
//! Owns: that run. In: a seed. Out: the report.
//!
//! [`mod@env`] is the cluster of `make cluster`. [`workload`] changes Deployments and Services, [`probes`] use Services meanwhile,
//! [`faults`] break parts of it. [`watch`] looks at processes, health, Lease and Node all the time; after each round of faults comes a
//! quiet phase, in which [`checks`] compare the node with what the API server wants.

mod checks;
mod controllers;
mod env;
mod faults;
mod probes;
mod report;
mod watch;
mod workload;

pub(crate) use faults::LANES;

use crate::interrupt::Interrupt;
use crate::lanes::{Fault, Lane};
use crate::report::Finished;
use crate::timeline::{Broken, Timeline};
use crate::{Args, Phase};
use anyhow::{Context as _, Result, ensure};
use checks::{Checker, Rest};
use env::NodeEnv;
use keelson_cluster::one_node::place;
use keelson_harness::peers;
use probes::{Kind, Probe, ProbeSpec};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch as channel;

/// Faults in a row before a quiet phase.
const ROUND: Duration = Duration::from_secs(180);
/// Runs that are shorter have no part in which processes live on.
const LONG_RUN: f64 = 20.0;

/// Moves this process to the place of the node. It must have one thread.
pub(crate) fn enter_place() -> Result<()> {
    // Peers are built before, because the place has empty folders of its own.
    for program in ["kube-apiserver", "kubectl"] {
        peers::kubernetes(program)?;
    }
    peers::chart_tool("helm")?;
    peers::cni()?;
    peers::coredns()?;
    peers::containerd_v2()?;
    peers::cri_driver()?;
    peers::etcd(true)?;
    place::enter()
}

pub(crate) async fn run(args: &Args, seed: u64, timeline: &Timeline) -> Result<Finished> {
    // The make target builds it; a run without it says so in its report.
    let is_built = std::env::var_os("KEELSON_TEST_FORMER").is_some_and(|path| !path.is_empty());
    let former = is_built.then(peers::former).transpose()?;
    let env = Arc::new(NodeEnv::start(former, timeline).await?);
    let outcome = soak(args, seed, &env, timeline).await;
    if outcome.is_err() || timeline.violations() > 0 {
        env.keep_logs(&args.out).await?;
    }
    outcome?.finish()
}

async fn soak(args: &Args, seed: u64, env: &Arc<NodeEnv>, timeline: &Timeline) -> Result<report::Report> {
    workload::start_steady(env).await?;
    let (phase, phases) = channel::channel(Phase::Faults);
    let work = workload::Workload::start(env, timeline, seed, &phases).await?;
    let client = client_namespace(env).await?;
    let probes = probe_specs(&client).into_iter().map(|spec| Probe::start(spec, timeline));
    let watcher = watch::Watcher::start(env, probes.collect::<Result<_>>()?, timeline, &phases);
    let checker = Checker::start(env, timeline)?;
    println!("started; injecting faults for {} minutes", args.minutes);
    let mut lanes =
        LANES.map(|spec| Lane::new(spec, &args.faults, seed, timeline, &phases)).into_iter().collect();

    let (began, total) = (Instant::now(), Duration::from_secs_f64(args.minutes * 60.0));
    let mut rests: Vec<Rest> = Vec::new();
    let (mut interrupt, mut interrupted) = (Interrupt::watch()?, false);
    while began.elapsed() < total && !interrupted {
        phase.send_replace(Phase::Faults);
        let left_out =
            left_out(env.former.is_some(), args.minutes, began.elapsed().as_secs_f64() / total.as_secs_f64());
        timeline.record("phase", &format!("faults, without {left_out:?}"));
        let running: Vec<_> = Vec::from_iter(std::mem::take::<Vec<Lane>>(&mut lanes))
            .into_iter()
            .map(|lane| tokio::spawn(lane.run(env.clone(), left_out.clone())))
            .collect();
        tokio::select! {
            () = tokio::time::sleep(ROUND.min(total.saturating_sub(began.elapsed()))) => {}
            () = interrupt.wait() => interrupted = true,
        }
        phase.send_replace(Phase::Settle);
        for lane in running {
            lanes.push(lane.await.context("a lane of faults panicked")??);
        }
        timeline.record("phase", "all faults are undone");
        let paused = work.pause().await.map_err(|error| {
            timeline.violation("the work goes on", &format!("{error:#}"));
        });
        let rest = checker.check().await;
        drop(paused);
        let minutes = began.elapsed().as_secs() / 60;
        println!(
            "after {minutes} minutes: settled in {:.0} s, {} violations",
            rest.settled_after_seconds,
            timeline.violations()
        );
        timeline.record("phase", &format!("quiet: {rest:?}"));
        rests.push(rest);
    }
    phase.send_replace(Phase::Done);
    let writes = work.stop().await?;
    let watched = watcher.stop().await?;
    let report = report::Report::new(args, seed, timeline, watched, rests, writes, env.former.is_some());
    report.check_rests(timeline);
    Ok(report.with_violations(timeline))
}

/// Faults that are not injected now. `share`: how much of the run has passed. In the middle half of a long run, agent and proxy live
/// on, so that a life is long enough to see it grow.
fn left_out(has_former: bool, minutes: f64, share: f64) -> Vec<Fault> {
    let mut left_out = Vec::new();
    if !has_former {
        left_out.extend(faults::NEED_FORMER);
    }
    if minutes >= LONG_RUN && (0.25..0.75).contains(&share) {
        left_out.extend(faults::END_LIVES);
    }
    left_out
}

/// The network namespace of the pod `client`.
async fn client_namespace(env: &NodeEnv) -> Result<PathBuf> {
    let get = ["get", "pods", "-l", "app=client", "-o", "jsonpath={.items[0].metadata.name}"];
    let name = env.operator.kubectl(&get).await?.success()?.out;
    ensure!(!name.is_empty(), "there is no pod of the client");
    let variable = format!("HOSTNAME={name}");
    let processes = fs::read_dir("/proc").context("cannot list processes")?;
    let path = processes.flatten().map(|entry| entry.path()).find(|path| {
        let variables = fs::read(path.join("environ")).unwrap_or_default();
        variables.split(|byte| *byte == 0).any(|one| one == variable.as_bytes())
    });
    Ok(path.with_context(|| format!("no process of {name}"))?.join("ns/net"))
}

fn probe_specs(client: &Path) -> Vec<ProbeSpec> {
    const STEADY: &[Broken] = &[Broken::Rules];
    /// What delays that a change of endpoints comes to the rules.
    const GRACEFUL: &[Broken] = &[
        Broken::Rules,
        Broken::AgentKilled,
        Broken::AgentRestarted,
        Broken::Proxy,
        Broken::Backend,
        Broken::Kubelet,
        Broken::Runtime,
        Broken::Api,
        Broken::Controllers,
    ];
    let at = |last: u8| ([10, 96, 7, last], 80).into();
    let dns = ([10, 96, 0, 10], 53).into();
    let pod = || Some(client.to_owned());
    let short = |name, to, from, excuses, after| ProbeSpec {
        name,
        kind: Kind::Short,
        to,
        from,
        excuses,
        after: Duration::from_secs(after),
        pause: Duration::from_millis(50),
    };
    let long = |name, to, from| ProbeSpec {
        kind: Kind::Established,
        pause: Duration::from_millis(500),
        ..short(name, to, from, STEADY, 30)
    };
    let name = Kind::Dns("steady.default.svc.cluster.local");
    vec![
        short("ClusterIP from the node", at(1), None, STEADY, 5),
        short("ClusterIP from a pod", at(1), pod(), STEADY, 5),
        short("affinity from a pod", at(2), pod(), STEADY, 5),
        short("node port from the node", ([192, 0, 2, 10], 30777).into(), None, STEADY, 5),
        short("node port from a pod", ([192, 0, 2, 10], 30777).into(), pod(), STEADY, 5),
        // An agent takes up to 42 s after an outage of the API server (docs/decisions/0048).
        short("graceful changes from a pod", at(4), pod(), GRACEFUL, 45),
        long("established from the node", at(1), None),
        long("established from a pod", at(1), pod()),
        long("established at a node port", ([192, 0, 2, 10], 30777).into(), pod()),
        ProbeSpec { kind: name, ..short("DNS from the node", dns, None, STEADY, 10) },
        ProbeSpec { kind: name, ..short("DNS from a pod", dns, pod(), STEADY, 10) },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agent_and_proxy_live_on_in_the_middle_half_of_a_long_run() {
        let keeps_lives = |minutes, share| {
            faults::END_LIVES.iter().all(|fault| left_out(true, minutes, share).contains(fault))
        };
        assert!(keeps_lives(120.0, 0.25) && keeps_lives(120.0, 0.7));
        assert!(!keeps_lives(120.0, 0.2) && !keeps_lives(120.0, 0.75), "the ends");
        assert!(!keeps_lives(3.0, 0.5), "a short run");
    }

    #[test]
    fn without_a_former_version_nothing_is_replaced_by_it() {
        assert_eq!(left_out(true, 3.0, 0.5), []);
        assert_eq!(left_out(false, 3.0, 0.5), faults::NEED_FORMER);
    }
}
