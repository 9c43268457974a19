use std::{
    pin::Pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::{Stream, StreamExt as _, stream};
use keelson_client::Options;
use keelson_proto::{
    endpoints::{self as pb, endpoints_server as watch_server, watch_item::Item},
    localnetv1::{self as local, endpoints_server as next_server},
};
use tokio::{
    net::UnixListener,
    sync::watch::{self, Receiver},
    task::JoinSet,
    time::timeout,
};
use tokio_stream::wrappers::{UnixListenerStream, WatchStream};
use tonic::{Request, Response, Status, transport::Server};

use super::*;
use crate::cli::testing::parsed;

const LONG: Duration = Duration::from_secs(60);

type Answer<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Serves one state, and on `Watch` every list of items that it is given.
#[derive(Clone)]
struct Scripted {
    state: Vec<local::NextItem>,
    items: Receiver<Vec<Item>>,
}

#[tonic::async_trait]
impl next_server::Endpoints for Scripted {
    type NextStream = Answer<local::NextItem>;

    async fn next(&self, request: Request<local::NextFilter>) -> Result<Response<Self::NextStream>, Status> {
        if request.get_ref().rev == 5 {
            return Ok(Response::new(Box::pin(stream::pending())));
        }
        Ok(Response::new(Box::pin(stream::iter(self.state.clone().into_iter().map(Ok)))))
    }
}

#[tonic::async_trait]
impl watch_server::Endpoints for Scripted {
    type WatchStream = Answer<pb::WatchItem>;

    async fn watch(&self, _: Request<pb::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let lists = WatchStream::new(self.items.clone());
        let items = lists.flat_map(stream::iter).map(|item| Ok(pb::WatchItem { item: Some(item) }));
        Ok(Response::new(Box::pin(items)))
    }

    async fn report(&self, _: Request<pb::Backend>) -> Result<Response<pb::ReportAnswer>, Status> {
        Err(Status::unimplemented("a watch sends no report"))
    }
}

fn web() -> ServiceEndpoints {
    let v4 = |ip: &str| Some(local::IpSet { v4: vec![ip.into()], v6: Vec::new() });
    let endpoint = |ip: &str, ready, selected| local::Endpoint {
        hostname: String::new(),
        conditions: Some(local::EndpointConditions {
            ready,
            selected,
            local: selected,
            serving: true,
            terminating: !ready,
        }),
        i_ps: v4(ip),
        ports: vec![local::EndpointPort { index: 0, port: 8080, cluster: selected, local: false }],
    };
    ServiceEndpoints {
        namespace: "shop".into(),
        name: "web".into(),
        r#type: "NodePort".into(),
        i_ps: Some(local::ServiceIPs { cluster_i_ps: v4("10.96.0.7"), ..Default::default() }),
        ports: vec![
            local::PortMapping {
                name: "http".into(),
                protocol: local::Protocol::Tcp.into(),
                port: 80,
                node_port: 30080,
                target_port: 8080,
                has_any_v4: true,
                has_any_v6: false,
            },
            local::PortMapping { protocol: local::Protocol::Udp.into(), port: 53, ..Default::default() },
        ],
        endpoints: vec![endpoint("10.1.0.1", true, true), endpoint("10.1.0.2", false, false)],
        ..Default::default()
    }
}

fn dns() -> ServiceEndpoints {
    ServiceEndpoints {
        namespace: "kube-system".into(),
        name: "dns\x1b[2J".into(),
        r#type: "ClusterIP".into(),
        i_ps: Some(local::ServiceIPs { cluster_ip: "10.96.0.10".into(), ..Default::default() }),
        ..Default::default()
    }
}

fn node() -> NodeInfo {
    NodeInfo {
        name: "worker-7".into(),
        exists: true,
        zone: "a".into(),
        i_ps: Some(local::IpSet { v4: vec!["192.0.2.7".into()], v6: Vec::new() }),
        eligible: true,
        ..Default::default()
    }
}

fn sync(rev: u64, stale: &str) -> Item {
    Item::Sync(pb::Sync {
        instance_id: u64::MAX,
        rev,
        stale: !stale.is_empty(),
        stale_reason: stale.into(),
        stale_since_unix_ms: if stale.is_empty() { 0 } else { 1_700_000_000_000 },
        ..pb::Sync::default()
    })
}

/// A server with this state and these changes, and the output of a command.
struct Rig {
    folder: tempfile::TempDir,
    items: watch::Sender<Vec<Item>>,
    /// Aborted on drop.
    _server: JoinSet<()>,
}

impl Rig {
    fn start(items: Vec<Item>) -> Self {
        let next = local::NextFilter {
            instance_id: u64::MAX,
            rev: 5,
            stale: true,
            stale_reason: "the API server\nis gone".into(),
            stale_since_unix_ms: 1_700_000_000_000,
            ..Default::default()
        };
        let item = |endpoints| local::NextItem { endpoints: Some(endpoints), ..Default::default() };
        let first = local::NextItem { next: Some(next), node: Some(node()), ..Default::default() };
        let (items, received) = watch::channel(items);
        let scripted = Scripted { state: vec![first, item(dns()), item(web())], items: received };
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("e.sock")).unwrap();
        let server = JoinSet::from_iter([async move {
            let server = Server::builder()
                .add_service(next_server::EndpointsServer::new(scripted.clone()))
                .add_service(watch_server::EndpointsServer::new(scripted));
            server.serve_with_incoming(UnixListenerStream::new(listener)).await.unwrap();
        }]);
        Self { folder, items, _server: server }
    }

    fn args(&self, words: &[&str]) -> WatchArgs {
        let target = format!("unix://{}/e.sock", self.folder.path().display());
        parsed(&[words, &["--target", &target]].concat()).unwrap()
    }

    /// The output and messages of `--once`.
    async fn once(&self, words: &[&str]) -> (ExitCode, String, String) {
        let args = self.args(&[words, &["--once"]].concat());
        let (out, stderr) = (Mutex::new(String::new()), Mutex::new(String::new()));
        let client = Client::new(args.endpoints.options());
        let print = |text: &str| {
            out.lock().unwrap().push_str(text);
            Ok(())
        };
        let say = |text: &str| stderr.lock().unwrap().push_str(&format!("{text}\n"));
        let code = timeout(LONG, run(args, client, print, say)).await.expect("it ends").unwrap();
        (code, out.into_inner().unwrap(), stderr.into_inner().unwrap())
    }

    /// The output of a watch until it contains this text, and its messages. Serves these items once it has printed.
    async fn watch(&self, words: &[&str], until: &str, then: Vec<Item>) -> (String, String) {
        let args = self.args(words);
        let client = Client::new(args.endpoints.options());
        let cancel = client.cancellation();
        let out = Arc::new(Mutex::new(String::new()));
        let sink = out.clone();
        let until = until.to_owned();
        let stderr = Mutex::new(String::new());
        let print = move |text: &str| {
            sink.lock().unwrap().push_str(text);
            if sink.lock().unwrap().contains(&until) {
                cancel.cancel();
            }
            Ok(())
        };
        let say = |text: &str| stderr.lock().unwrap().push_str(text);
        let after = async {
            while out.lock().unwrap().is_empty() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            self.items.send(then).unwrap();
        };
        let (ran, ()) = tokio::join!(timeout(LONG, run(args, client, print, say)), after);
        assert_eq!(ran.expect("it ends").unwrap(), ExitCode::SUCCESS);
        let out = out.lock().unwrap().clone();
        (out, stderr.into_inner().unwrap())
    }
}

const RESUME: &str = "keelson: to resume from this revision: --instance-id 18446744073709551615 --rev 5\n";
const STALE: &str = "keelson: this state is stale since 2023-11-14T22:13:20Z: the API server is gone\n";

#[test]
fn arguments() {
    let args: WatchArgs = parsed(&["shop/web", "-o", "yaml", "--once"]).unwrap();
    assert!(args.shows(&ServiceName::new("shop", "web")) && !args.shows(&ServiceName::new("shop", "web2")));
    assert_eq!((args.output, args.once, args.endpoints.options()), (Form::Yaml, true, Options::default()));
    let args: WatchArgs = parsed(&["-n", "shop"]).unwrap();
    assert!(args.shows(&ServiceName::new("shop", "x")) && !args.shows(&ServiceName::new("shop2", "x")));
    for wrong in [&["web"][..], &["shop/"], &["/web"], &["a/b/c"], &["shop/web", "-n", "x"], &["-o", "xml"]] {
        assert!(parsed::<WatchArgs>(wrong).is_err(), "{wrong:?}");
    }
}

#[test]
fn flags_override_the_settings() {
    let target = |listen: &[&str]| {
        let listen: Vec<_> = listen.iter().map(|text| ListenSpec::parse(text).unwrap()).collect();
        reachable(&listen).map(|target| target.to_string()).map_err(|error| format!("{error:#}"))
    };
    assert_eq!(target(&["tcp://127.0.0.1:1", "unix:///a.sock", "unix:///b.sock"]).unwrap(), "unix:///a.sock");
    assert_eq!(target(&["tcp://[::1]:12345"]).unwrap(), "tcp://[::1]:12345");
    assert_eq!(target(&["tcp://0.0.0.0:12345"]).unwrap(), "tcp://127.0.0.1:12345");
    assert_eq!(target(&["tcp://[::]:12345"]).unwrap(), "tcp://[::1]:12345");
    assert!(target(&[]).unwrap_err().contains("endpoints.listen is empty"));
    assert!(target(&["tcp://127.0.0.1:0"]).unwrap_err().contains("--target"));

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keelson.toml");
    std::fs::write(&file, "[endpoints]\nlisten = [\"unix:///run/elsewhere.sock\"]\n").unwrap();
    assert_eq!(served_at(Some(file.clone())).unwrap().to_string(), "unix:///run/elsewhere.sock");
    std::fs::write(&file, "[endpoints]\nlisten = 7\n").unwrap();
    assert!(format!("{:#}", served_at(Some(file)).unwrap_err()).contains("pass it with --target"));
    assert!(parsed::<WatchArgs>(&["--config", "x", "--target", "unix:///x"]).is_err());
}

#[tokio::test]
async fn once_as_a_table() {
    let rig = Rig::start(Vec::new());
    let (code, out, stderr) = rig.once(&[]).await;
    let expected = "\
SERVICE                  TYPE       CLUSTER-IPS  PORTS                       ENDPOINTS
kube-system/dns\u{fffd}[2J  ClusterIP  10.96.0.10   -                           0 ready, 0 selected
shop/web                 NodePort   10.96.0.7    http 80:30080/TCP, 53/UDP  1 ready, 1 selected
";
    assert_eq!(collapse_spaces(&out), collapse_spaces(expected));
    assert_eq!((code, stderr), (ExitCode::SUCCESS, format!("{STALE}{RESUME}")));

    let (_, out, _) = rig.once(&["shop/web"]).await;
    let expected = "\
SERVICE TYPE CLUSTER-IPS PORTS ENDPOINTS
shop/web NodePort 10.96.0.7 http 80:30080/TCP, 53/UDP 1 ready, 1 selected

ADDRESS PORTS CONDITION LOCAL SELECTED
10.1.0.1 8080 ready yes yes
10.1.0.2 8080 serving, terminating - -
";
    assert_eq!(collapse_spaces(&out), expected);
}

fn collapse_spaces(text: &str) -> String {
    text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ") + "\n").collect()
}

#[tokio::test]
async fn once_for_scripts() {
    let rig = Rig::start(Vec::new());
    let (_, json, stderr) = rig.once(&["-n", "shop", "-o", "json"]).await;
    assert_eq!(stderr, format!("{STALE}{RESUME}"));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let expected = serde_json::json!({
        "instanceID": "18446744073709551615",
        "rev": 5,
        "stale": true,
        "staleReason": "the API server\nis gone",
        "staleSinceUnixMs": 1_700_000_000_000_i64,
        "node": {
            "name": "worker-7", "exists": true, "zone": "a", "ips": ["192.0.2.7"], "podCIDRs": [],
            "serviceCIDRs": [], "eligible": true,
        },
        "services": [{
            "namespace": "shop", "name": "web", "type": "NodePort", "clusterIPs": ["10.96.0.7"],
            "externalIPs": [], "loadBalancerIPs": [], "sourceRanges": [], "internalTrafficToLocal": false,
            "externalTrafficToLocal": false, "clientIPAffinitySeconds": 0, "healthCheckNodePort": 0,
            "localReady": {"ipv4": 0, "ipv6": 0},
            "ports": [
                {"name": "http", "protocol": "TCP", "port": 80, "nodePort": 30080, "targetPort": 8080,
                    "hasAny": {"ipv4": true, "ipv6": false}},
                {"name": "", "protocol": "UDP", "port": 53, "nodePort": 0, "targetPort": 0,
                    "hasAny": {"ipv4": false, "ipv6": false}},
            ],
            "endpoints": [
                {"addresses": ["10.1.0.1"], "ready": true, "serving": true, "terminating": false, "local": true,
                    "selected": true, "ports": [{"index": 0, "port": 8080, "cluster": true, "local": false}]},
                {"addresses": ["10.1.0.2"], "ready": false, "serving": true, "terminating": true, "local": false,
                    "selected": false, "ports": [{"index": 0, "port": 8080, "cluster": false, "local": false}]},
            ],
        }],
    });
    assert_eq!(json, expected);
    let (_, yaml, _) = rig.once(&["-n", "shop", "-o", "yaml"]).await;
    let yaml: serde_json::Value = serde_saphyr::from_str(&yaml).unwrap();
    assert_eq!(yaml, expected);
}

#[tokio::test]
async fn once_with_an_unknown_service() {
    let rig = Rig::start(Vec::new());
    let (code, out, stderr) = rig.once(&["shop/none"]).await;
    assert_eq!((code, &*out), (ExitCode::FAILURE, ""));
    assert_eq!(stderr, format!("keelson: Service shop/none does not exist or has no cluster IP\n{RESUME}"));
}

fn first() -> Vec<Item> {
    vec![Item::Reset(pb::Reset {}), Item::Node(node()), Item::Set(dns()), Item::Set(web()), sync(1, "")]
}

fn second() -> Vec<Item> {
    let mut fewer = web();
    fewer.endpoints.truncate(1);
    let gone = pb::ServiceName { namespace: "kube-system".into(), name: dns().name };
    vec![Item::Delete(gone), Item::Set(fewer), sync(2, "the API server is gone")]
}

#[tokio::test]
async fn changes_as_lines() {
    let rig = Rig::start(first());
    let (out, stderr) = rig.watch(&[], "! stale", second()).await;
    let expected = "\
* node worker-7  zone a  192.0.2.7
+ kube-system/dns\u{fffd}[2J  ClusterIP  10.96.0.10  -  0 ready, 0 selected
+ shop/web  NodePort  10.96.0.7  http 80:30080/TCP, 53/UDP  1 ready, 1 selected
- kube-system/dns\u{fffd}[2J
~ shop/web  NodePort  10.96.0.7  http 80:30080/TCP, 53/UDP  1 ready, 1 selected
! stale since 2023-11-14T22:13:20Z: the API server is gone
";
    assert_eq!(out, expected);
    assert_eq!(stderr, "keelson: to resume from this revision: --instance-id 18446744073709551615 --rev 2");
}

#[tokio::test]
async fn changes_for_scripts() {
    for form in ["json", "yaml"] {
        let rig = Rig::start(first());
        let (out, _) = rig.watch(&["-n", "kube-system", "-o", form], "API server is gone", second()).await;
        let changes: Vec<serde_json::Value> = if form == "json" {
            out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
        } else {
            out.split("---\n").skip(1).map(|document| serde_saphyr::from_str(document).unwrap()).collect()
        };
        let kinds: Vec<&str> = changes.iter().map(|change| change["change"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["node", "set", "sync", "delete", "sync"]);
        assert_eq!(changes[1]["service"]["clusterIPs"], serde_json::json!(["10.96.0.10"]));
        assert_eq!(
            (&changes[2]["rev"], &changes[2]["instanceID"]),
            (&1.into(), &u64::MAX.to_string().into())
        );
        assert_eq!(changes[3]["name"], *dns().name);
        assert_eq!(changes[4]["staleReason"], "the API server is gone");
    }
}

#[tokio::test]
async fn a_closed_output_ends_the_command() {
    let rig = Rig::start(first());
    let ends_with = async |kind: io::ErrorKind| {
        let args = rig.args(&[]);
        let client = Client::new(args.endpoints.options());
        let print = |_: &str| Err(io::Error::from(kind));
        timeout(LONG, run(args, client, print, |_| {})).await.expect("it ends")
    };
    assert_eq!(ends_with(io::ErrorKind::BrokenPipe).await.unwrap(), ExitCode::SUCCESS);
    assert!(ends_with(io::ErrorKind::StorageFull).await.is_err());
}
