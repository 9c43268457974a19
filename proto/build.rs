//! Compiles the .proto files with protox, so that protoc is not required.

use prost::Message as _;
use std::{env, fs, path::PathBuf};

const FILES: &[&str] = &[
    "cri.proto",
    "containerd_leases.proto",
    "containerd_content.proto",
    "containerd_snapshots.proto",
    "debug.proto",
    "node.proto",
    "localnetv1.proto",
    "endpoints.proto",
    "kubernetes.proto",
    "proxy.proto",
];

/// Fields of kubernetes.proto whose JSON name is not in camel case: the field, its name.
const KUBERNETES_NAMES: &[(&str, &str)] = &[
    ("ServiceSpec.cluster_ip", "clusterIP"),
    ("ServiceSpec.cluster_ips", "clusterIPs"),
    ("ServiceSpec.external_ips", "externalIPs"),
    ("SessionAffinityConfig.client_ip", "clientIP"),
];

/// Messages that the HTTP side of the debug API and the CLI show as JSON, with the field names of debug.proto.
const AS_JSON: &[&str] = &[
    "Readiness",
    "Check",
    "GetVersionResponse",
    "Actor",
    "MessageStats",
    "ActorEvent",
    "PullList",
    "Pull",
    "Progress",
    "Limit",
    "Storage",
    "StorageTable",
    "Config",
    "Setting",
    "FeatureGate",
];

/// The same of node.proto.
const NODE_AS_JSON: &[&str] = &[
    "Heartbeats",
    "Lease",
    "Status",
    "Condition",
    "Credential",
    "SetConditionResponse",
    "ClearConditionResponse",
];

/// The same of endpoints.proto.
const ENDPOINTS_AS_JSON: &[&str] = &[
    "State",
    "SourceState",
    "FileFault",
    "NodeState",
    "Watcher",
    "Backend",
    "ServiceSummary",
    "Explanation",
    "PortExplanation",
    "FamilyExplanation",
    "TrafficExplanation",
    "EndpointExplanation",
    "SliceExplanation",
];

/// The same of proxy.proto.
const PROXY_AS_JSON: &[&str] = &["State", "FamilyState", "HealthCheck", "Event", "Explanation", "Way"];

/// Fields with another form in JSON: the field, its serde attribute.
const FIELDS_AS_JSON: &[(&str, &str)] = &[
    ("Pull.state", r#"#[serde(serialize_with = "crate::json::pull_state")]"#),
    ("Actor.state_json", r#"#[serde(rename = "state", serialize_with = "crate::json::embedded")]"#),
    ("Setting.value", r#"#[serde(serialize_with = "crate::json::embedded")]"#),
];

/// The same for endpoints.proto: JSON cannot represent numbers of this size.
const ENDPOINTS_FIELDS_AS_JSON: &[(&str, &str)] =
    &[("Backend.instance_id", r#"#[serde(serialize_with = "crate::json::as_text")]"#)];

fn with_json(mut builder: tonic_prost_build::Builder) -> tonic_prost_build::Builder {
    for (package, messages) in [
        ("keelson.debug.v1", AS_JSON),
        ("keelson.node.v1", NODE_AS_JSON),
        ("keelson.endpoints.v1", ENDPOINTS_AS_JSON),
        ("keelson.proxy.v1", PROXY_AS_JSON),
    ] {
        for message in messages {
            builder = builder.type_attribute(format!(".{package}.{message}"), "#[derive(serde::Serialize)]");
        }
    }
    for (field, attribute) in FIELDS_AS_JSON {
        builder = builder.field_attribute(format!(".keelson.debug.v1.{field}"), *attribute);
    }
    for (field, attribute) in ENDPOINTS_FIELDS_AS_JSON {
        builder = builder.field_attribute(format!(".keelson.endpoints.v1.{field}"), *attribute);
    }
    builder = builder.type_attribute(
        ".keelson.kubernetes",
        "#[derive(serde::Serialize, serde::Deserialize)] #[serde(default, rename_all = \"camelCase\")]",
    );
    // Equal objects must have equal bytes; elements are ordered by the names of their sets.
    builder = builder.btree_map(".keelson.kubernetes").btree_map(".keelson.proxy");
    for (field, name) in KUBERNETES_NAMES {
        let attribute = format!("#[serde(rename = {name:?})]");
        builder = builder.field_attribute(format!(".keelson.kubernetes.{field}"), attribute);
    }
    builder
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let set = protox::compile(FILES, ["proto"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), set.encode_to_vec())?;
    with_json(tonic_prost_build::configure().build_transport(false)).compile_fds(set)?;
    Ok(())
}
