//! The supported formats of files.

use super::super::{
    document::Fault,
    object::{Body, Object},
    parse::{is_manifest, parse},
};
use keelson_endpoint_publisher::{EndpointSlice, Service, SourceKind};
use prost::Message;

fn names(name: &str, text: &str) -> Vec<String> {
    let objects = parse(name, text.as_bytes()).unwrap_or_else(|faults| panic!("{text}: {faults:?}"));
    objects
        .iter()
        .map(|object| format!("{} {} {}", object.key.0.resource(), object.key.1, object.line))
        .collect()
}

fn faults(name: &str, text: &str) -> Vec<(u32, String)> {
    let faults: Vec<Fault> = parse(name, text.as_bytes()).expect_err(text);
    faults.into_iter().map(|fault| (fault.line, fault.reason)).collect()
}

fn has_one_fault(name: &str, text: &str, line: u32, reason: &str) {
    let faults = faults(name, text);
    let [(at, said)] = &faults[..] else { panic!("{text}: {faults:?}") };
    assert!(*at == line && said.contains(reason) && !said.contains('\n'), "{text}: {faults:?}");
}

fn packed(object: &Object) -> bytes::Bytes {
    let Body::Packed(bytes) = &object.body else { panic!("{object:?}") };
    bytes.clone()
}

/// The first object of a YAML file.
fn first<T: Message + Default>(text: &str) -> T {
    T::decode(packed(&parse("a.yaml", text.as_bytes()).unwrap()[0])).unwrap()
}

const SERVICE: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {}\n";

#[test]
fn documents_comments_and_emptiness() {
    for text in
        ["", "\n", "---\n", "# nothing\n", "---\n---\n# nothing\n---\n", "null\n", "--- ~\n", "\u{feff}"]
    {
        assert_eq!(names("a.yaml", text), [""; 0], "{text:?}");
    }
    let text = format!(
        "# first\n---\n\n{SERVICE}---\n# between\n---\n{}...\n",
        SERVICE.replace("name: a", "name: b, namespace: ns")
    );
    assert_eq!(names("a.yml", &text), ["services default/a 4", "services ns/b 11"]);
    assert_eq!(names("a.yaml", &SERVICE.replace('\n', "\r\n")), ["services default/a 1"]);
}

#[test]
fn json_objects_one_after_the_other() {
    for text in ["", " \n "] {
        assert_eq!(names("a.json", text), [""; 0], "{text:?}");
    }
    let one = r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"a","namespace":null},"spec":{"ports":null}}"#;
    let text = format!("\n{one}{}\n\n{}", one.replace("\"a\"", "\"b\""), one.replace("\"a\"", "\"c\""));
    assert_eq!(
        names("a.json", &text),
        ["services default/a 2", "services default/b 2", "services default/c 4"]
    );
    // The name determines YAML, not the content, which may look like JSON.
    assert_eq!(names("a.yaml", &format!("\n{one}\n")), ["services default/a 2"]);
}

#[test]
fn lists_of_every_sort() {
    let yaml = "apiVersion: v1\nkind: List\nmetadata: {resourceVersion: ''}\nitems:\n\
        - apiVersion: v1\n  kind: Service\n  metadata: {name: a}\n  spec: {}\n\
        - apiVersion: v1\n  kind: List\n  items:\n  - {apiVersion: v1, kind: Service, metadata: {name: b}, spec: {}}\n\
        - apiVersion: v1\n  kind: List\n  items: null\n- {apiVersion: v1, kind: List}\n\
        - {apiVersion: v1, kind: ConfigMap, metadata: {name: c}, items: 7}\n\
        - kind: ServiceList\n  apiVersion: v1\n  items:\n  - metadata: {name: d}\n    spec: {}\n";
    assert_eq!(
        names("a.yaml", yaml),
        ["services default/a 5", "services default/b 12", "services default/d 21"]
    );
    let typed = r#"{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSliceList","items":[
        {"metadata":{"name":"a"},"addressType":"IPv4","endpoints":null,"ports":null},
        {"metadata":{"name":"b"},"addressType":"IPv6","endpoints":[]}]}
        {"apiVersion":"networking.k8s.io/v1","kind":"ServiceCIDRList","items":[{"metadata":{"name":"c"},"spec":{"cidrs":["10.0.0.0/8"]}}]}
        {"apiVersion":"v1","kind":"NodeList","items":[{"metadata":{"name":"n"}}]}
        {"apiVersion":"v1","kind":"List","items":null}{"apiVersion":"v1","kind":"PodList","items":[7]}"#;
    let wanted =
        ["endpointslices default/a 2", "endpointslices default/b 3", "servicecidrs /c 4", "nodes /n 5"];
    assert_eq!(names("a.json", typed), wanted);
    let yaml = typed.replace("}\n        {\"api", "}\n---\n{\"api").replace("}{\"api", "}\n---\n{\"api");
    assert_eq!(names("a.yaml", &yaml).len(), 4);
}

#[test]
fn nulls_are_unset_fields_and_other_kinds_are_ignored() {
    let text = "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: a\n  namespace: ns\n  creationTimestamp: null\n  \
        labels:\n    kubernetes.io/service-name: s\n    service.kubernetes.io/headless:\n  annotations: null\n\
        addressType: IPv4\nendpoints: null\nports:\n- {name: null, port: 80, appProtocol: null}\n";
    let read: EndpointSlice = first(text);
    assert!(read.endpoints.is_empty());
    assert_eq!((read.ports[0].name.as_deref(), read.ports[0].port), (Some(""), Some(80)));
    assert_eq!(
        read.metadata.unwrap().labels["service.kubernetes.io/headless"],
        "",
        "a label without a value is one"
    );
    for text in [
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {}\nspec: [whatever]\n",
        "apiVersion: serving.knative.dev/v1\nkind: Service\nmetadata: {name: x}\n",
        "apiVersion: v1\nkind: Endpoints\nsubsets: null\n",
        "apiVersion: v1\nkind: PodList\nitems: [1]\n",
    ] {
        assert_eq!(names("a.yaml", text), [""; 0]);
    }
}

#[test]
fn fields_are_those_of_the_api() {
    let text = r"
apiVersion: v1
kind: Service
metadata:
  name: a
  annotations:
    kubectl.kubernetes.io/last-applied-configuration: long
    other: kept
spec:
  clusterIP: 10.0.0.1
  clusterIPs: [10.0.0.1, 'fd00::1']
  externalIPs: [192.0.2.1]
  internalTrafficPolicy: Local
  sessionAffinity: ClientIP
  sessionAffinityConfig: {clientIP: {timeoutSeconds: 7}}
  ports:
  - {name: http, port: 80, targetPort: web, nodePort: 30080, protocol: TCP}
status:
  loadBalancer: {ingress: [{ip: 192.0.2.9, ipMode: Proxy}]}
";
    let read: Service = first(text);
    let spec = read.spec.unwrap();
    assert_eq!((&*spec.cluster_ip, spec.cluster_ips.len()), ("10.0.0.1", 2));
    assert_eq!(spec.external_ips, ["192.0.2.1"]);
    assert_eq!(spec.internal_traffic_policy.as_deref(), Some("Local"));
    assert_eq!(spec.session_affinity_config.unwrap().client_ip.unwrap().timeout_seconds, Some(7));
    assert_eq!((spec.ports[0].node_port, &*spec.ports[0].name), (30080, "http"));
    assert_eq!(read.status.unwrap().load_balancer.unwrap().ingress[0].ip_mode.as_deref(), Some("Proxy"));
    let annotations = read.metadata.unwrap().annotations;
    assert_eq!(annotations.keys().collect::<Vec<_>>(), ["other"]);
}

#[test]
fn anchors_and_merges_work_and_bombs_do_not() {
    let text = "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec:\n  clusterIP: 10.0.0.1\n  ports:\n  \
        - &p {name: x, port: 1}\n  - {<<: *p, name: z}\n";
    let ports = first::<Service>(text).spec.unwrap().ports;
    assert_eq!(ports.iter().map(|p| (&*p.name, p.port)).collect::<Vec<_>>(), [("x", 1), ("z", 1)]);
    let mut bomb = "a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n".to_owned();
    for level in 1..12 {
        let one = format!("*a{}, ", level - 1).repeat(9);
        bomb += &format!("a{level}: &a{level} [{one}]\n");
    }
    let long = format!("a: &a {}\nb: [{}]\n", "x".repeat(1 << 20), "*a, ".repeat(90));
    let deep = "[".repeat(100_000);
    for (name, text) in [("a.yaml", &bomb), ("a.yaml", &long), ("a.yaml", &deep), ("a.json", &deep)] {
        assert_eq!(faults(name, text).len(), 1, "{name}: {:.20}", text);
    }
    let nested = r#"{"apiVersion":"v1","kind":"List","items":["#.repeat(40) + &"]}".repeat(40);
    assert_eq!(faults("a.json", &nested)[0].1, "lists are nested too deeply");
    assert_eq!(faults("a.yaml", &nested)[0].1, "lists are nested too deeply");
}

#[test]
fn a_large_file_is_no_bomb() {
    let text = (0..3000)
        .map(|n| SERVICE.replace("name: a", &format!("name: s{n}")))
        .collect::<Vec<_>>()
        .join("---\n");
    assert_eq!(names("a.yaml", &text).len(), 3000);
}

#[test]
fn faults_are_named_with_their_line() {
    let port = "apiVersion: v1\nkind: Service\nmetadata:\n  name: a\nspec:\n  ports:\n  - port: 1\n  - name: x\n    port: eighty\n";
    let list = "kind: List\napiVersion: v1\nitems:\n- apiVersion: v1\n  kind: Service\n  metadata: {name: a}\n  spec: {}\n\
        - apiVersion: v1\n  kind: Service\n  metadata:\n    name: 7\n  spec: {}\n";
    let second = format!("{SERVICE}---\n# x\n{port}");
    for (text, line, reason) in [
        ("a: [", 1, ""),
        ("apiVersion: v1\nkind: Service\n\tmetadata: x\n", 2, "tab"),
        ("a: 1\nb: 2\na: 3\n", 3, "duplicate"),
        ("- a\n", 1, "expected an object, found a list"),
        ("hello\n", 1, "found text"),
        ("kind: Service\n", 1, "apiVersion is missing"),
        ("apiVersion: v1\n", 1, "kind is missing"),
        ("apiVersion: v1\nkind: 7\n", 2, "kind: is not a string"),
        ("apiVersion: v2\nkind: Service\n", 1, "apiVersion: v2 of Service is not supported; use v1"),
        ("\nkind: EndpointSlice\napiVersion: discovery.k8s.io/v1beta1\n", 3, "use discovery.k8s.io/v1"),
        ("apiVersion: v1\nkind: Service\nspec: {}\n", 1, "metadata: name is missing"),
        ("apiVersion: v1\nkind: Service\nmetadata:\n  name: ''\nspec: {}\n", 4, "metadata: name is missing"),
        (
            "apiVersion: v1\nkind: Service\nmetadata:\n  name: a/b\nspec: {}\n",
            4,
            "metadata.name: \"a/b\" is not a valid name",
        ),
        ("apiVersion: v1\nkind: Service\nmetadata: {name: a}\n", 1, "spec is missing"),
        (
            "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: a}\n",
            1,
            "addressType is missing",
        ),
        (port, 9, "spec.ports[1].port: invalid type: string \"eighty\", expected i32"),
        (&second, 15, "spec.ports[1].port: invalid type"),
        (list, 11, "metadata.name: invalid type: integer `7`, expected a string"),
        ("apiVersion: v1\nkind: List\nitems: {}\n", 1, "items is not a list"),
        ("apiVersion: v1\nkind: List\nitems:\n- 7\n", 4, "found a number"),
        (&format!("{SERVICE}---\n{SERVICE}"), 6, "duplicate Service default/a, first defined on line 1"),
    ] {
        has_one_fault("a.yaml", text, line, reason);
    }
}

#[test]
fn json_faults_are_named_with_their_line() {
    let good = "{\"apiVersion\":\"v1\",\"kind\":\"Service\",\n\"metadata\":{\"name\":\"a\"},\"spec\":{}}\n";
    let port = "{\"apiVersion\":\"v1\",\"kind\":\"Service\",\"metadata\":{\"name\":\"b\"},\n\"spec\":{\n\t\"ports\":[{\"port\":80},\n\t{\"port\":\"x\"}]}}";
    let list = format!("{{\"apiVersion\":\"v1\",\"kind\":\"List\",\"items\":[\n{good},\n{port}]}}");
    for (text, line, reason) in [
        ("{", 1, "EOF"),
        ("{}\n\n}", 3, "expected value"),
        ("\n{}", 2, "kind is missing"),
        ("[]", 1, "expected an object"),
        ("\n7", 2, "expected an object"),
        (&format!("{good}{port}"), 6, "spec.ports[1].port: invalid type: string \"x\", expected i32"),
        (&list, 8, "spec.ports[1].port"),
        (&format!("{good}\n{good}"), 4, "duplicate Service default/a, first defined on line 1"),
        ("{\"apiVersion\":\"v1\",\"kind\":\"List\",\"items\":7}", 1, "items is not a list"),
    ] {
        has_one_fault("a.json", text, line, reason);
    }
}

#[test]
fn faults_are_named_up_to_a_limit() {
    let text = "kind: Service\n---\napiVersion: v1\n---\n- x\n";
    assert_eq!(faults("a.yaml", text).iter().map(|fault| fault.0).collect::<Vec<_>>(), [1, 3, 5]);
    assert_eq!(faults("a.yaml", &"kind: Service\n---\n".repeat(1000)).len(), 20);
    assert_eq!(
        parse("a.yaml", b"a: 1\nb: \xff\n").unwrap_err(),
        [Fault { line: 2, reason: "the file is not valid UTF-8".to_owned() }]
    );
}

#[test]
fn names_of_manifests() {
    for name in ["a.yaml", "a.yml", "a.json", "a.b.yaml", "-.yaml"] {
        assert!(is_manifest(name), "{name}");
    }
    for name in ["a.YAML", "a.yaml~", ".a.yaml", "a.yaml.swp", "a.yaml.tmp", "yaml", "a", "..data", ".yaml"] {
        assert!(!is_manifest(name), "{name}");
    }
}

#[test]
fn cidrs_and_nodes_have_no_namespace() {
    let text = "apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: a, namespace: x}\n";
    let objects = parse("a.yaml", text.as_bytes()).unwrap();
    assert_eq!(objects[0].key.0, SourceKind::ServiceCidrs);
    assert_eq!(objects[0].key.1.as_str(), "/a");
}
