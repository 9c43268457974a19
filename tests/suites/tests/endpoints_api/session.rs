//! A client that only knows the protocol, through a whole session.

use crate::common::{TestEnv, eventually_slow, of_namespace, plain};
use crate::python::{Generated, Python, State};
use anyhow::{Result, ensure};
use keelson_cluster::endpoints::{endpoint, port, service, slice};
use serde_json::{Value, json};
use std::fs;

/// A dual-stack load balancer with endpoints in every condition, two of them on the agent's node.
fn gateway() -> Vec<Value> {
    let spec = json!({
        "type": "LoadBalancer", "clusterIP": "10.96.0.7", "clusterIPs": ["10.96.0.7", "fd00:96::7"],
        "ipFamilies": ["IPv4", "IPv6"], "externalTrafficPolicy": "Local", "externalIPs": ["192.0.2.7", "2001:db8::7"],
    });
    let ports = [
        json!({"name": "https", "protocol": "TCP", "port": 443, "targetPort": "https", "nodePort": 30443}),
        json!({"name": "quic", "protocol": "UDP", "port": 443}),
        json!({"name": "sctp", "protocol": "SCTP", "port": 9}),
    ];
    let slice_ports = [port("https", 8443), json!({"name": "quic", "protocol": "UDP", "port": 8443})];
    let terminating = json!({"conditions": {"ready": false, "serving": true, "terminating": true}});
    let dead = json!({"conditions": {"ready": false, "serving": false, "terminating": true}});
    let v4 = [
        endpoint("10.1.0.2", "elsewhere", &json!({})),
        endpoint("10.1.0.1", "node", &json!({"hostname": "first"})),
        endpoint("10.1.0.3", "node", &terminating),
        endpoint("10.1.0.4", "node", &dead),
    ];
    let v6 = [endpoint("fd00:1::1", "node", &json!({}))];
    vec![
        of_namespace(service("gateway", &ports, &spec)),
        of_namespace(slice("gateway", "four", &slice_ports, &v4)),
        of_namespace(slice("gateway", "six", &slice_ports, &v6)),
    ]
}

/// The state that a client gets for [`gateway`].
fn gateway_as_seen() -> Value {
    let endpoint =
        |hostname: &str, (ready, selected, local): (bool, bool, bool), v4: &[&str], v6: &[&str]| {
            json!({
                "Hostname": hostname,
                "Conditions": {"Ready": ready, "Selected": selected, "Local": local},
                "IPs": {"V4": v4, "V6": v6},
            })
        };
    json!({
        "Namespace": "ns", "Name": "gateway", "Type": "LoadBalancer", "MapAll": false,
        "IPs": {"ClusterIP": "10.96.0.7", "ExternalIPs": {"V4": ["192.0.2.7"], "V6": ["2001:db8::7"]}},
        "Ports": [
            {"Name": "https", "Protocol": "TCP", "Port": 443, "NodePort": 30443, "TargetPort": 8443},
            {"Name": "quic", "Protocol": "UDP", "Port": 443, "NodePort": 0, "TargetPort": 8443},
            {"Name": "sctp", "Protocol": "SCTP", "Port": 9, "NodePort": 0, "TargetPort": 0},
        ],
        "Endpoints": [
            endpoint("first", (true, true, true), &["10.1.0.1"], &[]),
            endpoint("", (true, true, false), &["10.1.0.2"], &[]),
            endpoint("", (false, false, true), &["10.1.0.3"], &[]),
            endpoint("", (true, true, true), &[], &["fd00:1::1"]),
        ],
        "ExternalTrafficToLocal": true,
    })
}

fn web(addresses: &[&str]) -> Vec<Value> {
    plain("web", "10.96.0.1", addresses)
}

/// The next state of all clients, which is the same except for filters, has this revision.
async fn all_at(clients: &mut [Python], instance_id: u64, rev: u64) -> Result<Vec<State>> {
    let mut states = Vec::new();
    for client in clients {
        let state = client.state().await?;
        ensure!((state.instance_id, state.rev) == (instance_id, rev), "{}: {state:?}", client.name);
        states.push(state);
    }
    Ok(states)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_generated_from_the_protocol_completes_a_session() -> Result<()> {
    let mut env = TestEnv::new()?;
    let generated = Generated::generate(&env.scratch).await?;
    env.manifests.put("gateway.json", &gateway())?;
    env.manifests.put("web.json", &web(&["10.1.1.1"]))?;
    // A client that starts before the agent gets only errors.
    let mut clients = [
        generated.client("unix", &env.target(), &[])?,
        generated.client("tcp", &env.tcp, &[])?,
        generated.client("ready", &env.target(), &["--require", "Ready"])?,
        generated.client(
            "chosen",
            &env.tcp,
            &["--require", "Ready", "--require", "Selected", "--require", "Local"],
        )?,
    ];
    env.agent.start_live().await?;

    // The first state is complete.
    let instance_id = env.wait_for_rev(1).await?;
    let first = all_at(&mut clients, instance_id, 1).await?;
    ensure!(first[0].services.len() == 2 && first[0].services[0] == gateway_as_seen(), "{:#?}", first[0]);
    ensure!(first[0].required == Value::Null, "{:?}", first[0]);
    ensure!(
        first[0].services[1]["Type"] == "ClusterIP" && first[0].addresses("web") == Some(vec!["10.1.1.1"])
    );
    ensure!(first[1] == first[0], "by TCP it is another: {:#?}", first[1]);

    // Filters remove endpoints, but no Service.
    let addresses = ["10.1.0.1", "10.1.0.2", "fd00:1::1"];
    ensure!(first[2].addresses("gateway") == Some(addresses.to_vec()), "{:#?}", first[2]);
    ensure!(first[2].required == json!({"Ready": true, "Selected": false, "Local": false}), "{:?}", first[2]);
    ensure!(first[3].addresses("gateway") == Some(vec!["10.1.0.1", "fd00:1::1"]), "{:#?}", first[3]);
    ensure!(first[3].addresses("web") == Some(Vec::new()), "{:#?}", first[3]);

    // They wait while nothing changes, also if a file is replaced by an equal one.
    env.wait_for_watchers(4, 1).await?;
    env.manifests.put("web.json", &web(&["10.1.1.1"]))?;
    env.manifests.put("web.json", &web(&["10.1.1.1", "10.1.1.2"]))?;
    let second = all_at(&mut clients, instance_id, 2).await?;
    ensure!(second[0].addresses("web") == Some(vec!["10.1.1.1", "10.1.1.2"]), "{:#?}", second[0]);
    ensure!(second[0].services[0] == first[0].services[0], "nothing else has changed");
    // A change that a filter removes changes the revision too.
    ensure!(second[3].services == first[3].services, "{:#?}", second[3]);

    // A restart makes no revision.
    env.wait_for_watchers(4, 2).await?;
    for client in &mut clients {
        client.errors();
    }
    ensure!(env.agent.terminate().await?.success());
    env.agent.start_live().await?;
    env.wait_for_watchers(4, 2).await?;
    env.manifests.remove("web.json")?;
    let third = all_at(&mut clients, instance_id, 3).await?;
    ensure!(third[0].services == vec![gateway_as_seen()], "{:#?}", third[0]);
    // An agent that stops tells the clients it can reach within its time limit.
    let mut output = 0;
    for client in &mut clients {
        let errors = client.errors();
        ensure!(errors.iter().all(|(code, _)| code == "UNAVAILABLE"), "{}: {errors:?}", client.name);
        output += usize::from(errors.first().is_some_and(|(_, details)| details == "the agent is stopping"));
    }
    ensure!(output > 0, "no client got the status that the agent stops");

    // All changes while the agent is dead are one state after its start.
    env.agent.endpoints_written().await?;
    env.agent.kill9()?;
    env.manifests.put("web.json", &web(&["10.1.1.3"]))?;
    env.manifests.remove("gateway.json")?;
    env.agent.start_live().await?;
    let fourth = all_at(&mut clients, instance_id, 4).await?;
    ensure!(fourth[0].services.len() == 1 && fourth[0].addresses("web") == Some(vec!["10.1.1.3"]));

    // A lost store is a new instance, and no client waits.
    env.agent.kill9()?;
    fs::remove_dir_all(env.agent.state_dir())?;
    env.agent.start_live().await?;
    let lost = env.wait_for_rev(1).await?;
    ensure!(lost != instance_id && lost != 0, "{lost} after {instance_id}");
    let fifth = all_at(&mut clients, lost, 1).await?;
    ensure!(fifth[0].services == fourth[0].services, "{:#?}", fifth[0]);
    env.wait_for_watchers(4, 1).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_at_another_revision_gets_the_latest_state_at_once() -> Result<()> {
    let env = TestEnv::started().await?;
    let generated = Generated::generate(&env.scratch).await?;
    env.manifests.put("web.json", &web(&["10.1.1.2"]))?;
    let instance_id = env.wait_for_rev(2).await?;
    let (own, other) = (instance_id.to_string(), (instance_id ^ 1).to_string());
    let most = u64::MAX.to_string();
    let mut may_be_renamed = false;
    // An older revision, a future one, one of another instance, one of none, the largest numbers.
    for (id, rev) in
        [(&own, "1"), (&own, "3"), (&other, "2"), (&"0".to_owned(), "5"), (&own, &most), (&most, &most)]
    {
        let args = ["--instance-id", id, "--rev", rev, "--count", "1"];
        let mut client = generated.client("once", &env.target(), &args)?;
        let state = client.state().await?;
        may_be_renamed |= id == &own && rev != "1";
        ensure!(
            state.rev == 2 && (may_be_renamed || state.instance_id == instance_id),
            "{args:?}: {state:?}"
        );
        ensure!(state.addresses("web") == Some(vec!["10.1.1.2"]), "{args:?}: {state:?}");
        client.ended().await?;
    }
    // E12: a future revision shows that the state folder was restored, and all get a new instance ID.
    eventually_slow("there is a new instance ID", || async {
        ensure!(env.wait_for_rev(2).await? != instance_id);
        Ok(())
    })
    .await
}
