//! Tables of other programs, and other programs' changes of the proxy's table.

use crate::common::{TestEnv, ensure_contains, eventually_slow};
use crate::kernel;
use crate::model::{PORT, Service, pool};
use crate::traffic::Traffic;
use anyhow::{Context as _, Result, anyhow, ensure};
use keelson_cluster::net::{Family, Namespace, Outcome, Transport, World, http_get_from};
use keelson_harness::util::PATIENCE;
use std::fs;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

/// Tables of another program; some have a name of ours, but none has our name and family.
const FOREIGN: &str = "
table inet firewall {
    set friends { type ipv4_addr; flags interval; elements = { 192.0.2.0/24, 198.51.100.7 } }
    map marks { type ipv4_addr : mark; elements = { 192.0.2.1 : 0x00000001 } }
    counter seen { }
    chain input {
        type filter hook input priority -5; policy accept;
        ip saddr @friends accept
    }
    chain prerouting {
        type filter hook prerouting priority -150; policy accept;
        meta mark set ip saddr map @marks
    }
}
table ip nat {
    chain PREROUTING {
        type nat hook prerouting priority dstnat; policy accept;
        tcp dport 9999 dnat to 192.0.2.9:99
    }
    chain keelson {
        return
    }
}
table ip keelson-other {
    set slots { type ipv4_addr; elements = { 192.0.2.3 } }
}
table inet keelson {
    chain services {
        return
    }
}
table bridge keelson {
    chain services {
        drop
    }
}
";
const TABLES: [(&str, &str); 5] = [
    ("inet", "firewall"),
    ("ip", "nat"),
    ("ip", "keelson-other"),
    ("inet", "keelson"),
    ("bridge", "keelson"),
];

fn make(env: &TestEnv) -> Result<()> {
    let file = env.scratch.path().join("foreign.nft");
    fs::write(&file, FOREIGN)?;
    env.node().nft(&["-f", &file.display().to_string()]).map(drop)
}

/// With handles, which change when a table is recreated.
fn listed(node: &Namespace) -> Result<String> {
    let one = |(family, name): (&str, &str)| node.nft(&["-a", "list", "table", family, name]);
    TABLES.into_iter().map(one).collect()
}

/// A plain one and one with affinity, of both families.
fn services() -> Vec<Service> {
    let mut all = Vec::new();
    for (index, family) in (0..).zip(Family::ALL) {
        let mut plain = Service::new(10 + index, family, &pool(family, 8080)[..4]);
        plain.node_port = Some(31_000 + index);
        let mut affine = Service::new(12 + index, family, &pool(family, 8081)[3..]);
        affine.affinity = Some(600);
        all.extend([plain, affine]);
    }
    all
}

/// Checks new connections to all Services from all clients.
async fn served(env: &TestEnv, services: &[Service]) -> Result<()> {
    Traffic::start(&env.world, services)?.finish().await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_tables_stay_unchanged() -> Result<()> {
    let mut services = services();
    let mut env = TestEnv::new()?;
    make(&env)?;
    let before = listed(env.node())?;
    env.start(&services).await?;
    ensure!(listed(env.node())? == before, "a start");
    services[0].endpoints.truncate(2);
    services[0].write(&env.manifests)?;
    let gone = services.pop().context("the last one")?;
    gone.delete(&env.manifests)?;
    env.wait_for_services(&services).await?;
    ensure!(listed(env.node())? == before, "changes");
    env.proxy.kill9()?;
    env.proxy.start_again(env.world.node()).await?;
    env.wait_for_services(&services).await?;
    env.node().nft(&["delete", "table", "ip", "keelson"])?;
    env.wait_for_exact_services(&services).await?;
    ensure!(listed(env.node())? == before, "a restart, and repairs");
    ensure!(env.proxy.terminate().await?.success());
    let mut removed = env.cleanup(&[]).await?;
    removed.sort();
    ensure!(removed == ["removed table ip keelson", "removed table ip6 keelson"], "{removed:?}");
    ensure!(listed(env.node())? == before, "cleanup");
    let left = env.node().nft(&["list", "tables"])?;
    ensure!(left.lines().count() == TABLES.len(), "{left}");
    ensure!(env.cleanup(&[]).await? == ["nothing to remove"]);
    ensure!(listed(env.node())? == before, "another cleanup");
    Ok(())
}

/// Runs a command on the table, and waits until it is detected and repaired.
async fn disturbed(env: &TestEnv, services: &[Service], family: Family, command: &[&str]) -> Result<()> {
    let repaired = || async { env.family(family).await?["repaired"].as_u64().context("no number") };
    let before = repaired().await?;
    env.node().nft(command)?;
    eventually_slow("it is noticed", || async {
        ensure!(repaired().await? > before, "it is not");
        Ok(())
    })
    .await
    .with_context(|| env.logs())?;
    env.wait_for_exact_services(services).await?;
    served(env, services).await
}

/// Minimum number of commits of another program, and of rounds of changes beside them.
const NOISE: u64 = 100;
const ROUNDS: u32 = 10;

/// A program that commits to its own table as fast as it can, as some CNIs do. Stopped on drop.
struct Noise {
    stop: Arc<AtomicBool>,
    commits: Arc<AtomicU64>,
    thread: Option<thread::JoinHandle<Result<()>>>,
}

impl Noise {
    fn start(world: &Arc<World>) -> Self {
        let (world, stop) = (world.clone(), Arc::new(AtomicBool::new(false)));
        let commits = Arc::<AtomicU64>::default();
        let (stopped, count) = (stop.clone(), commits.clone());
        let body = move || {
            while !stopped.load(Ordering::Relaxed) {
                world
                    .node()
                    .nft(&["add table inet noise; add chain inet noise c; delete chain inet noise c"])?;
                count.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        };
        Self { stop, commits, thread: Some(thread::spawn(body)) }
    }

    /// Whether it has not committed enough yet. Fails if it has exited.
    fn is_young(&self) -> Result<bool> {
        let has_ended = self.thread.as_ref().is_none_or(thread::JoinHandle::is_finished);
        ensure!(!has_ended, "the program that commits ended");
        Ok(self.commits.load(Ordering::Relaxed) < NOISE)
    }

    fn end(mut self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("it ends once")?;
        thread.join().map_err(|_| anyhow!("it panicked"))?
    }
}

impl Drop for Noise {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// P2: changes, a restart and repairs beside a program that commits all the time.
#[tokio::test(flavor = "multi_thread")]
async fn p2_a_program_that_commits_all_the_time_blocks_nothing() -> Result<()> {
    let services = services();
    let env = TestEnv::started(&services).await?;
    beside_noise(env, services).await
}

#[tokio::test(flavor = "multi_thread")]
async fn p2_a_program_that_commits_all_the_time_blocks_nothing_with_ebpf() -> Result<()> {
    let services = services();
    let env = TestEnv::started_at_sockets(&services).await?;
    beside_noise(env, services).await
}

/// With the tables by a reference of the test, otherwise by a comparison from scratch.
async fn has_services(env: &TestEnv, services: &[Service]) -> Result<()> {
    if env.is_nft() {
        env.wait_for_services(services).await
    } else {
        env.wait_for_exact_services(services).await
    }
}

async fn beside_noise(mut env: TestEnv, mut services: Vec<Service>) -> Result<()> {
    let noise = Noise::start(&env.world);
    let mut rounds = 0;
    while rounds < ROUNDS || noise.is_young()? {
        rounds += 1;
        for service in &mut services {
            service.endpoints.rotate_left(1);
            service.write(&env.manifests)?;
        }
        let gone = services[0].endpoints.pop().context("one left")?;
        services[0].write(&env.manifests)?;
        has_services(&env, &services).await?;
        services[0].endpoints.push(gone);
    }
    let state = env.family(Family::V4).await?;
    ensure!(state["failures"] == 0 && state["full_syncs"] == 1, "{state}");
    env.proxy.kill9()?;
    env.proxy.start_again(env.world.node()).await?;
    services[0].endpoints.truncate(2);
    services[0].write(&env.manifests)?;
    has_services(&env, &services).await?;
    let element = format!("{{ {} . tcp . {PORT} }}", services[0].ip());
    disturbed(
        &env,
        &services,
        Family::V4,
        &["delete", "element", "ip", "keelson", "cluster-ip-ports", &element],
    )
    .await?;
    let state = env.family(Family::V4).await?;
    ensure!(state["failures"] == 0, "{state}");
    noise.end()
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_changes_of_the_table_are_repaired() -> Result<()> {
    let services = services();
    let env = TestEnv::started(&services).await?;
    let v = format!("{{ {} . tcp . 80 }}", services[0].ip());
    // Existing connections continue, whatever happens to rules that only new ones use.
    let mut flows = Traffic::none(&env.world)?;
    for service in &services {
        for client in [env.world.pod(), env.world.client(), env.world.host()] {
            flows.open_flow(client, service.at(), Transport::Tcp, service.endpoints.clone());
        }
    }
    flows.wait_for_answers().await?;
    for command in [
        &["delete", "element", "ip", "keelson", "cluster-ip-ports", &v][..],
        &["add", "element", "ip", "keelson", "cluster-ip-ports", "{ 10.96.99.99 . tcp . 80 : 4010:1 }"],
        &["add", "element", "ip", "keelson", "slots", "{ 0:1 . 7 : 192.0.2.66 . 66 }"],
        &["flush", "map", "ip", "keelson", "slots"],
        &["flush", "chain", "ip", "keelson", "services"],
        &["flush", "chain", "ip", "keelson", "lb-4"],
        &["insert", "rule", "ip", "keelson", "services", "drop"],
        &[
            "insert",
            "rule",
            "ip",
            "keelson",
            "nat-prerouting",
            "tcp",
            "dport",
            "80",
            "dnat",
            "to",
            "192.0.2.66",
        ],
        &["add", "chain", "ip", "keelson", "mine"],
        &["add", "set", "ip", "keelson", "mine", "{ type ipv4_addr; }"],
        &["add", "map", "ip", "keelson", "slots-2", "{ type ipv4_addr : verdict; }"],
    ] {
        disturbed(&env, &services, Family::V4, command).await.with_context(|| format!("{command:?}"))?;
    }
    disturbed(&env, &services, Family::V6, &["flush", "map", "ip6", "keelson", "affinity-endpoints"]).await?;
    flows.finish().await?;
    for command in [
        &["delete", "table", "ip", "keelson"][..],
        &["flush", "table", "ip", "keelson"],
        &["flush", "ruleset"],
    ] {
        disturbed(&env, &services, Family::V4, command).await.with_context(|| format!("{command:?}"))?;
    }
    ensure_contains(
        &env.events().await?.join("\n"),
        &["table ip keelson was modified by another program; repaired: "],
    )?;
    ensure_contains(&env.proxy.log()?, &["table modified by another program; repaired"])
}

/// The value of an IPv4 counter; 0 before it has counted anything.
async fn counter(env: &TestEnv, name: &str) -> Result<u64> {
    let at = SocketAddr::from(([127, 0, 0, 1], 10249));
    let text = http_get_from(env.node(), at, "/metrics").await?.success()?.text();
    let series = format!("keelson_proxy_{name}_total{{ip_family=\"IPv4\"}} ");
    let value = text.lines().find_map(|line| line.strip_prefix(&series)).unwrap_or("0");
    value.parse().with_context(|| format!("{name} is {value:?}"))
}

/// P21: the counters count elements, chains and sets, not repairs.
#[tokio::test(flavor = "multi_thread")]
async fn p21_the_counters_count_elements_chains_and_sets() -> Result<()> {
    let services = services();
    let env = TestEnv::started(&services).await?;
    let of_v4 = services.iter().filter(|service| service.family == Family::V4).count() as u64;
    ensure!(counter(&env, "operations").await? > 10 * of_v4, "the first sync made chains, sets and elements");
    ensure!(counter(&env, "repaired").await? == 0, "no program has changed anything");
    for (command, expected) in [
        (&["flush", "map", "ip", "keelson", "cluster-ip-ports"][..], of_v4),
        (&["add", "set", "ip", "keelson", "mine", "{ type ipv4_addr; }"], 1),
    ] {
        let counters =
            || async { anyhow::Ok([counter(&env, "repaired").await?, counter(&env, "operations").await?]) };
        let before = counters().await?;
        disturbed(&env, &services, Family::V4, command).await?;
        let after = counters().await?;
        ensure!(
            after == before.map(|count| count + expected),
            "{command:?}: {before:?}, then {after:?}, not {expected} more"
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn with_default_settings_a_deleted_table_is_restored() -> Result<()> {
    let services = services();
    let mut env = TestEnv::with(|options| options)?;
    env.start(&services).await?;
    for family in Family::ALL {
        env.node().nft(&["delete", "table", kernel::nft_family(family), "keelson"])?;
    }
    let began = Instant::now();
    env.wait_for_services(&services).await?;
    // The target is 30 s; a busy machine may need more, which is printed for readers.
    eprintln!("both tables were back after {:?}", began.elapsed());
    env.wait_for_exact_services(&services).await?;
    served(&env, &services).await
}

#[tokio::test(flavor = "multi_thread")]
async fn case_59_a_conflicting_element_is_repaired_at_once() -> Result<()> {
    let mut services = services();
    // It checks the table only every 10 s, so that the change comes first.
    let mut env = TestEnv::with(|options| options)?;
    env.start(&services).await?;
    for (number, family) in [(20, Family::V4), (21, Family::V6)] {
        services.push(Service::new(number, family, &pool(family, 8082)[..3]));
    }
    for service in &services[services.len() - 2..] {
        let element = format!("{{ {} . tcp . 80 : 4000:99 }}", service.ip());
        let family = kernel::nft_family(service.family);
        env.node().nft(&["add", "element", family, "keelson", "cluster-ip-ports", &element])?;
        service.write(&env.manifests)?;
    }
    env.wait_for_exact_services(&services).await?;
    for family in Family::ALL {
        let state = env.family(family).await?;
        ensure!(state["state"] == "synced" && state["failures"] == 0, "{state}");
    }
    let answered = env.world.pod().ask(services[services.len() - 1].at(), Transport::Tcp, PATIENCE).await?;
    ensure!(matches!(answered, Outcome::Answered { .. }), "{answered:?}");
    served(&env, &services).await
}
