//! The source survives any bytes.

use super::super::parse::parse;
use proptest::{collection::vec, prelude::*, sample::Index};

/// A manifest of all kinds, as YAML that is mostly JSON.
const SEED: &str = r#"# all
apiVersion: v1
kind: List
items:
- apiVersion: v1
  kind: Service
  metadata: {name: a, labels: {x: "y"}, annotations: null}
  spec:
    clusterIP: 10.0.0.1
    ports: [{name: p, port: 80, protocol: TCP}, &q {name: q, port: 81}, {<<: *q, name: r}]
  status: {loadBalancer: {ingress: [{ip: 192.0.2.1, ipMode: VIP}]}}
- {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}, "status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.9"}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: s, labels: {kubernetes.io/service-name: a}}
addressType: IPv4
endpoints: [{addresses: [10.1.0.1], conditions: {ready: true}, hints: {forZones: [{name: z}]}}]
ports: [{name: p, port: 80}]
---
{apiVersion: networking.k8s.io/v1, kind: ServiceCIDR, metadata: {name: c}, spec: {cidrs: [10.0.0.0/8]}}
"#;

const JSON: &str = r#"{"apiVersion":"v1","kind":"List","items":[{"apiVersion":"v1","kind":"Service","metadata":{"name":"a"},
"spec":{"clusterIP":"10.0.0.1","ports":[{"name":"p","port":80}]}}]}{"apiVersion":"networking.k8s.io/v1","kind":"ServiceCIDR",
"metadata":{"name":"c"},"spec":{"cidrs":["10.0.0.0/8"]}}"#;

fn all(bytes: &[u8]) {
    for name in ["a.yaml", "a.json"] {
        match parse(name, bytes) {
            Ok(objects) => objects.iter().for_each(|object| assert!(!object.key.1.name().is_empty())),
            Err(faults) => {
                assert!(!faults.is_empty() && faults.len() <= 20);
                let lines =
                    u32::try_from(bytes.iter().filter(|byte| **byte == b'\n' || **byte == b'\r').count())
                        .unwrap();
                for fault in faults {
                    assert!(!fault.reason.is_empty());
                    assert!(fault.line <= lines + 2, "{fault:?} of {lines}");
                }
            }
        }
    }
}

fn mutated(seed: &str, edits: &[(Index, u8, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = seed.as_bytes().to_vec();
    for (at, sort, new) in edits {
        if bytes.is_empty() {
            break;
        }
        let at = at.index(bytes.len());
        let end = (at + new.len()).min(bytes.len());
        match sort % 4 {
            0 => drop(bytes.splice(at..end, new.iter().copied())),
            1 => drop(bytes.drain(at..end)),
            2 => drop(bytes.splice(at..at, new.iter().copied())),
            _ => {
                let part = bytes[at..].to_vec();
                bytes.extend(part);
            }
        }
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes(bytes in vec(any::<u8>(), 0..300)) {
        all(&bytes);
    }

    #[test]
    fn random_punctuation(text in "[-a:?,{}\\[\\]&*!|>%@`'\"# \n\t~<=0x.]{0,200}") {
        all(text.as_bytes());
    }

    #[test]
    fn mutated_manifests(edits in vec((any::<Index>(), any::<u8>(), vec(prop_oneof![any::<u8>(), Just(b'\n'), Just(b' '), Just(b'"'), Just(b'{')], 0..6)), 1..5)) {
        all(&mutated(SEED, &edits));
        all(&mutated(JSON, &edits));
    }
}

#[test]
fn the_seeds_are_good() {
    assert_eq!(parse("a.yaml", SEED.as_bytes()).unwrap().len(), 4);
    assert_eq!(parse("a.json", JSON.as_bytes()).unwrap().len(), 2);
}
