//! With the rights of unit and manifest, and no others, everything works. Without rights: an error message, and no
//! change.

use crate::common::{TestEnv, ensure_contains, eventually_slow, family_of, run_inside};
use crate::kernel;
use crate::model::{PORT, Service, plain_and_affine};
use crate::traffic::Traffic;
use anyhow::{Context as _, Result, bail, ensure};
use keelson_cluster::manifests::PROXY as MANIFEST;
use keelson_cluster::net::plan::{NODE, local};
use keelson_cluster::net::{Family, Outcome, Transport, http_get_from};
use keelson_harness::command::CommandOutput;
use keelson_harness::peers;
use keelson_harness::process::{Process, Program};
use keelson_harness::util::PATIENCE;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::PathBuf;
use std::time::Duration;

const UNIT: &str = include_str!("../../../../packaging/keelson-proxy.service");
/// A uid that no other user has.
const UNPRIVILEGED_USER: u32 = 64_123;
/// CAP_NET_ADMIN as a bit. Source: capability.h.
const NET_ADMIN: u64 = 1 << 12;
/// What is read-only for a service of the unit as for a container, except conntrack's settings, which are also at `$1`:
/// `ReadWritePaths` opens them in place, the manifest elsewhere.
const SEALED: &str = r#"
set -e
mount --bind /proc/sys/net/netfilter "$1"
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
[ "$2" = elsewhere ] || mount --bind "$1" /proc/sys/net/netfilter
shift 2
exec "$@"
"#;

struct Rights {
    user: u32,
    /// Such as `net_admin`.
    capabilities: BTreeSet<String>,
    /// Whether they are ambient, without which only root has them.
    ambient: bool,
    /// Whether conntrack's settings can be written at another path than the usual one.
    elsewhere: bool,
}

impl Rights {
    fn of_unit() -> Result<Self> {
        let value = |key: &str| {
            let lines: Vec<&str> =
                UNIT.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('=')).collect();
            ensure!(lines.len() == 1, "the unit has {} lines of {key}", lines.len());
            Ok(lines[0])
        };
        let bounding = capabilities(value("CapabilityBoundingSet")?.split_whitespace())?;
        ensure!(capabilities(value("AmbientCapabilities")?.split_whitespace())? == bounding);
        ensure!(value("NoNewPrivileges")? == "yes" && value("DynamicUser")? == "yes");
        ensure!(
            value("ProtectKernelTunables")? == "yes"
                && value("ReadWritePaths")? == "-/proc/sys/net/netfilter"
        );
        Ok(Self { user: UNPRIVILEGED_USER, capabilities: bounding, ambient: true, elsewhere: false })
    }

    fn of_manifest() -> Result<Self> {
        let documents: Vec<Value> =
            serde_saphyr::from_multiple(MANIFEST).context("the manifest is no YAML")?;
        let set =
            documents.iter().find(|document| document["kind"] == "DaemonSet").context("no DaemonSet")?;
        let pod = &set["spec"]["template"]["spec"];
        let context = &pod["containers"][0]["securityContext"];
        ensure!(context["allowPrivilegeEscalation"] == false && context["privileged"] != true, "{context}");
        ensure!(context["capabilities"]["drop"] == json!(["ALL"]), "{context}");
        let added = context["capabilities"]["add"].as_array().context("nothing is added")?;
        let user = context["runAsUser"].as_u64().context("no user")?;
        let given = capabilities(added.iter().filter_map(Value::as_str))?;
        Ok(Self { user: u32::try_from(user)?, capabilities: given, ambient: false, elsewhere: true })
    }

    fn none(user: u32) -> Self {
        Self { user, capabilities: BTreeSet::new(), ambient: false, elsewhere: false }
    }

    /// `setpriv` and its arguments, to be followed by a program and its arguments.
    fn prefix(&self) -> Result<(PathBuf, Vec<String>)> {
        let set: String = self.capabilities.iter().map(|name| format!(",+{name}")).collect();
        let inheritable = if self.ambient { format!("-all{set}") } else { "-all".to_owned() };
        let args = vec![
            format!("--reuid={}", self.user),
            format!("--regid={}", self.user),
            "--clear-groups".to_owned(),
            format!("--bounding-set=-all{set}"),
            format!("--inh-caps={inheritable}"),
            format!("--ambient-caps={inheritable}"),
            "--no-new-privs".to_owned(),
            "--".to_owned(),
        ];
        Ok((peers::system("setpriv", "util-linux")?, args))
    }
}

fn capabilities<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<BTreeSet<String>> {
    let one = |name: &str| name.trim_start_matches("CAP_").to_lowercase();
    let all: BTreeSet<String> = names.into_iter().map(one).collect();
    ensure!(all == ["net_admin".to_owned()].into(), "it is given {all:?}, and must need CAP_NET_ADMIN only");
    Ok(all)
}

struct RestrictedProxy {
    env: TestEnv,
    folder: PathBuf,
    program: PathBuf,
}

impl RestrictedProxy {
    /// A running agent, and a prepared proxy whose files its user may use.
    async fn new(services: &[Service], others: &[Value], rights: &Rights) -> Result<Self> {
        // Node ports also at addresses that a node gets later.
        let networks = vec!["192.168.0.0/16".to_owned(), "fd00:10:1::/64".to_owned()];
        let mut env = TestEnv::with(|options| {
            options.set("proxy.sync_period", "1s").set("proxy.nodeport_addresses", networks)
        })?;
        for service in services {
            service.write(&env.manifests)?;
        }
        env.manifests.put("others.json", others)?;
        env.agent.start_live().await?;
        let socket = env.agent.endpoints_target();
        // As the unit's group does.
        chown(socket.trim_start_matches("unix://"), None, Some(rights.user))
            .context("cannot give the socket away")?;
        // Its user may not have access to the folder of the build.
        let program = env.scratch.path().join("keelson");
        fs::copy(peers::keelson()?, &program).context("cannot copy the program")?;
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
        let folder = env.proxy.folder().to_owned();
        chown(&folder, Some(rights.user), Some(rights.user)).context("cannot give the folder away")?;
        Ok(Self { env, folder, program })
    }

    fn start(&self, rights: &Rights) -> Result<Process> {
        let (setpriv, given) = rights.prefix()?;
        let config = self.env.proxy.config().display().to_string();
        let folder = self.env.scratch.dir("netfilter")?.display().to_string();
        let place = if rights.elsewhere { "elsewhere" } else { "usual" };
        let mut args =
            ["--mount", "--", "sh", "-c", SEALED, "sh", &folder, place].map(str::to_owned).to_vec();
        args.push(setpriv.display().to_string());
        args.extend(given);
        args.push(self.program.display().to_string());
        args.extend(["proxy", "--backend", "nft", "--config", &config].map(str::to_owned));
        let env = if rights.elsewhere {
            vec![("KEELSON_PROXY__CONNTRACK_SYSCTL_DIR".into(), folder)]
        } else {
            Vec::new()
        };
        let path = peers::system("unshare", "util-linux")?;
        let log = self.folder.join("proxy.log");
        let program = Program { name: "keelson proxy".to_owned(), path, args, env, log };
        self.env.node().in_namespace(&program)?.start()
    }

    /// Runs a command with these rights to its end.
    async fn command(&self, rights: &Rights, args: &[&str]) -> Result<CommandOutput> {
        let (path, mut all) = rights.prefix()?;
        let config = self.env.proxy.config().display().to_string();
        all.push(self.program.display().to_string());
        all.extend(["proxy", "--config", &config].map(str::to_owned));
        all.extend(args.iter().map(|arg| (*arg).to_owned()));
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        run_inside(self.env.node(), &path, &all).await
    }
}

/// Fields of `/proc/PID/status`: capability sets, uid, NoNewPrivs.
fn status(pid: u32) -> Result<impl Fn(&str) -> Result<String>> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).context("no such process")?;
    Ok(move |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        Ok(line.with_context(|| format!("no {key}"))?.trim().to_owned())
    })
}

fn has_no_more_than(pid: u32, rights: &Rights) -> Result<()> {
    let status = status(pid)?;
    for set in ["CapEff", "CapPrm", "CapBnd"] {
        let bits = u64::from_str_radix(&status(set)?, 16)?;
        ensure!(bits == NET_ADMIN, "{set} is {bits:x}");
    }
    ensure!(status("NoNewPrivs")? == "1");
    ensure!(
        status("Uid")?.split_whitespace().all(|uid| uid == rights.user.to_string()),
        "{}",
        status("Uid")?
    );
    Ok(())
}

/// TCP and UDP with a node port, and with affinity, of both families.
fn services() -> Vec<Service> {
    plain_and_affine(3, 600, |plain| {
        plain.transports.push(Transport::Udp);
        plain.expose();
    })
}

const CHECK: u16 = 32_100;

/// A Service with a health check node port and an endpoint on the node.
fn checked() -> [Value; 2] {
    let service = Service::new(30, Family::V4, &[local(1).at(Family::V4, 8082)]);
    let [mut object, slice] = service.objects();
    object["spec"]["type"] = json!("LoadBalancer");
    object["spec"]["externalTrafficPolicy"] = json!("Local");
    object["spec"]["healthCheckNodePort"] = json!(CHECK);
    object["status"] = json!({"loadBalancer": {"ingress": [{"ip": "172.30.9.9"}]}});
    [object, slice]
}

/// P1: conntrack's settings are kube-proxy's, except those of the whole machine, which cannot be written in a separate
/// network namespace: those are reported.
async fn conntrack_is_set(env: &TestEnv) -> Result<()> {
    let value = async |name: &str| {
        let file = format!("/proc/sys/net/netfilter/{name}");
        let output =
            run_inside(env.node(), &peers::system("cat", "coreutils")?, &[&file]).await?.success()?;
        Ok::<u64, anyhow::Error>(output.out.trim().parse()?)
    };
    eventually_slow("conntrack's times are kube-proxy's", || async {
        for (name, seconds) in
            [("nf_conntrack_tcp_timeout_established", 86_400), ("nf_conntrack_tcp_timeout_close_wait", 3_600)]
        {
            let now = value(name).await?;
            ensure!(now == seconds, "{name} is {now}");
        }
        Ok(())
    })
    .await?;
    let limit = value("nf_conntrack_max").await?;
    let output = eventually_slow("the state has all of them", || async {
        let state = env.state().await?;
        let lines: Vec<String> = serde_json::from_value(state["settings"].clone())?;
        let lines: Vec<String> = lines.into_iter().filter(|line| line.starts_with("nf_conntrack_")).collect();
        ensure!(lines.len() == 4, "{state}");
        Ok(lines)
    })
    .await?;
    for line in ["nf_conntrack_tcp_timeout_established: 86400", "nf_conntrack_tcp_timeout_close_wait: 3600"] {
        ensure!(output.iter().any(|output| output == line), "{output:?}");
    }
    let of_limit = output.iter().find(|line| line.starts_with("nf_conntrack_max: ")).context("no limit")?;
    let as_wanted = *of_limit == format!("nf_conntrack_max: {limit}");
    let refused = of_limit.starts_with(&format!("nf_conntrack_max: {limit} instead of "))
        && of_limit.contains("ermission denied");
    ensure!(as_wanted || refused, "{of_limit}");
    Ok(())
}

async fn check_everything_works(rights: &Rights) -> Result<()> {
    let mut services = services();
    let poor = RestrictedProxy::new(&services, &checked(), rights).await?;
    let (env, world) = (&poor.env, poor.env.world.clone());
    let process = poor.start(rights)?;
    env.synced().await.with_context(|| process.log_tail())?;
    has_no_more_than(process.pid(), rights)?;
    conntrack_is_set(env).await?;

    let traffic = Traffic::start(&world, &services)?;
    traffic.wait_for_answers().await?;
    let client = world.client();
    let check = http_get_from(client.namespace(), NODE.at(Family::V4, CHECK), "/").await?;
    ensure!(
        check.status == 200 && check.text().contains("\"localEndpoints\": 1"),
        "{} {}",
        check.status,
        check.text()
    );
    let livez = http_get_from(world.node(), SocketAddr::from(([127, 0, 0, 1], 10256)), "/livez").await?;
    ensure!(livez.status == 200, "{}", livez.text());
    let another: IpAddr = "192.168.77.7".parse()?;
    world.bind_to_node(another)?;
    eventually_slow("node ports are served at an address that is new", || async {
        let to = SocketAddr::new(another, 31_000);
        let outcome = world.pod().ask(to, Transport::Tcp, PATIENCE).await?;
        ensure!(
            matches!(outcome, Outcome::Answered { by, .. } if services[0].endpoints.contains(&by)),
            "{outcome:?}"
        );
        Ok(())
    })
    .await?;
    traffic.finish().await?;
    // Conntrack: a UDP flow whose endpoint is removed is moved.
    for service in services.iter_mut().filter(|service| service.transports.contains(&Transport::Udp)) {
        let mut flow = world.pod().open(service.at(), Transport::Udp)?;
        let Outcome::Answered { by: first, .. } = flow.ask(PATIENCE).await? else {
            bail!("no endpoint answers")
        };
        service.endpoints.retain(|endpoint| *endpoint != first);
        service.write(&env.manifests)?;
        eventually_slow("the flow is with another endpoint", || async {
            let outcome = world.pod().ask(service.at(), Transport::Udp, PATIENCE).await?;
            ensure!(matches!(outcome, Outcome::Answered { by, .. } if by != first), "{outcome:?}");
            Ok(())
        })
        .await?;
        loop {
            // One response may be lost at the moment of the change.
            match flow.ask(Duration::from_secs(2)).await? {
                Outcome::Answered { by, .. } if service.endpoints.contains(&by) => break,
                Outcome::Answered { .. } | Outcome::Dropped => {}
                other => bail!("{other:?}"),
            }
        }
    }
    // Repairs, and commands that need the rights too.
    env.node().nft(&["delete", "table", "ip", "keelson"])?;
    eventually_slow("the table is back", || async {
        ensure!(family_of(&env.state().await?, Family::V4)?["repaired"].as_u64() >= Some(1), "it is not");
        Ok(())
    })
    .await?;
    let output = poor.command(rights, &["--dry-run"]).await?.success()?;
    ensure!(output.out.trim() == "no changes", "{output:?}");
    drop(process);
    let (path, mut args) = rights.prefix()?;
    args.extend([poor.program.display().to_string(), "proxy".to_owned(), "cleanup".to_owned()]);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    run_inside(env.node(), &path, &args).await?.success()?;
    ensure!(env.node().nft(&["list", "tables"])?.is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_works_with_the_rights_of_the_unit() -> Result<()> {
    check_everything_works(&Rights::of_unit()?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_works_with_the_rights_of_the_manifest() -> Result<()> {
    check_everything_works(&Rights::of_manifest()?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn without_rights_it_reports_an_error_and_changes_nothing() -> Result<()> {
    let services = services();
    for user in [UNPRIVILEGED_USER, 0] {
        let none = Rights::none(user);
        let poor = RestrictedProxy::new(&services, &[], &none).await?;
        let node = poor.env.node();
        let generation = kernel::generation(node)?;
        let mut process = poor.start(&none)?;
        let ended = process.wait(PATIENCE).await?;
        ensure!(ended.code() == Some(1), "{ended:?}");
        ensure_contains(&process.log_tail(), &["CAP_NET_ADMIN"])?;
        ensure!(!process.log_tail().contains("panic"), "{}", process.log_tail());

        // Commands without changes need no rights, except those that must read.
        let output = poor.command(&none, &["--print"]).await?.success()?;
        ensure_contains(
            &output.out,
            &["table ip keelson", "table ip6 keelson", &format!("{} . tcp . {PORT}", services[0].ip())],
        )?;
        let output = poor.command(&none, &["--dry-run"]).await?;
        ensure!(output.code == Some(1), "{output:?}");
        ensure_contains(&output.err, &["CAP_NET_ADMIN"])?;
        ensure!(node.nft(&["list", "tables"])?.is_empty() && kernel::generation(node)? == generation);
    }
    Ok(())
}

/// Only root may list what an earlier backend left there.
#[tokio::test(flavor = "multi_thread")]
async fn rules_of_iptables_legacy_that_the_unit_may_not_list_are_reported() -> Result<()> {
    let rights = Rights::of_unit()?;
    let poor = RestrictedProxy::new(&services(), &[], &rights).await?;
    let legacy = peers::system("iptables-legacy", "iptables")?;
    poor.env.node().command(&legacy, &["-t", "nat", "-N", "KEELSON-NODE-PORTS"])?;
    let process = poor.start(&rights)?;
    eventually_slow("it is reported", || async {
        ensure_contains(
            &process.log_tail(),
            &["cannot check whether iptables-legacy has chains of Keelson", "only root can list its tables"],
        )
    })
    .await?;
    // The chain is still there.
    poor.env.node().command(&legacy, &["-t", "nat", "-L", "KEELSON-NODE-PORTS"]).map(drop)
}
