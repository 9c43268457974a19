//! The kernel's state, read without any code of the proxy.
//!
//! Owns: the path from a frontend to its endpoints through the maps of the table, as `nft -j` lists them; the count of
//! transactions. In: a namespace. Out: [`Meaning`], to be compared with the manifests; a dangling or unreferenced part
//! of the table is an error.

use crate::model::{Frontend, Meaning};
use anyhow::{Context as _, Result, bail, ensure};
use keelson_cluster::net::{Family, Namespace, Transport};
use netlink_packet_core::{NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_netfilter::nftables::{GenAttribute, GenMessage, NfTablesMessage};
use netlink_packet_netfilter::{
    NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily,
};
use netlink_sys::protocols::NETLINK_NETFILTER;
use netlink_sys::{Socket, SocketAddr as NetlinkAddress};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

/// Key and value of an element; fields of a concatenation follow each other.
type Element = (Vec<String>, Vec<String>);

pub(crate) fn nft_family(family: Family) -> &'static str {
    match family {
        Family::V4 => "ip",
        Family::V6 => "ip6",
    }
}

/// A table as `nft -j` lists it.
#[derive(Debug, Default)]
struct Table {
    sets: BTreeMap<String, Vec<Element>>,
    chains: BTreeMap<String, Vec<Value>>,
    hooks: BTreeMap<String, String>,
}

impl Table {
    fn read(namespace: &Namespace, family: Family) -> Result<Self> {
        let text = namespace.nft(&["-j", "list", "table", nft_family(family), "keelson"])?;
        let listed: Value = serde_json::from_str(&text).context("nft -j lists no JSON")?;
        let mut table = Self::default();
        for object in listed["nftables"].as_array().context("nft -j lists nothing")? {
            for kind in ["set", "map"] {
                if let Some(set) = object.get(kind) {
                    let none = Vec::new();
                    let elements = set["elem"].as_array().unwrap_or(&none).iter().map(element);
                    table.sets.insert(name(set, "name")?, elements.collect::<Result<_>>()?);
                }
            }
            if let Some(chain) = object.get("chain") {
                let own = name(chain, "name")?;
                if let Some(hook) = chain["hook"].as_str() {
                    table.hooks.insert(own.clone(), format!("{} {hook} {}", chain["type"], chain["prio"]));
                }
                table.chains.entry(own).or_default();
            }
            if let Some(rule) = object.get("rule") {
                table.chains.entry(name(rule, "chain")?).or_default().push(rule["expr"].clone());
            }
        }
        Ok(table)
    }

    fn set(&self, name: &str) -> Result<&[Element]> {
        self.sets.get(name).map(Vec::as_slice).with_context(|| format!("the table has no {name}"))
    }

    fn map(&self, name: &str) -> Result<BTreeMap<String, String>> {
        let elements = self.set(name)?;
        let map: BTreeMap<_, _> =
            elements.iter().map(|(key, value)| (key.join(" . "), value.join(" . "))).collect();
        ensure!(map.len() == elements.len(), "{name} has a key twice");
        Ok(map)
    }

    /// Number of endpoints that a chain chooses from: all of its rules must have the same, and look up this map.
    fn count(&self, chain: &str, map: &str) -> Result<usize> {
        let rules = self.chains.get(chain).with_context(|| format!("the table has no chain {chain}"))?;
        let mut counts = BTreeSet::new();
        for rule in rules {
            each_object(rule, &mut |object| {
                if let Some(numgen) = object.get("numgen") {
                    counts.insert((numgen["mod"].as_u64(), numgen["offset"].as_u64()));
                }
            });
        }
        let text = Value::from(rules.clone()).to_string();
        ensure!(text.contains(&format!("\"@{map}\"")), "chain {chain} does not ask {map}: {text}");
        match counts.iter().next() {
            Some((Some(count), Some(0))) if counts.len() == 1 => Ok(usize::try_from(*count)?),
            _ => bail!("chain {chain} chooses of {counts:?}"),
        }
    }
}

fn each_object(value: &Value, look: &mut impl FnMut(&serde_json::Map<String, Value>)) {
    match value {
        Value::Object(object) => {
            look(object);
            object.values().for_each(|value| each_object(value, look));
        }
        Value::Array(items) => items.iter().for_each(|value| each_object(value, look)),
        _ => {}
    }
}

fn name(object: &Value, key: &str) -> Result<String> {
    Ok(object[key].as_str().with_context(|| format!("no {key}: {object}"))?.to_owned())
}

fn element(listed: &Value) -> Result<Element> {
    // A pair in a map; in a dynamic one the key is an object with a timeout.
    let (key, value) = match listed {
        Value::Array(pair) if pair.len() == 2 => (&pair[0], fields(&pair[1])?),
        other => (other, Vec::new()),
    };
    Ok((fields(key.pointer("/elem/val").unwrap_or(key))?, value))
}

fn fields(value: &Value) -> Result<Vec<String>> {
    let one = |value: &Value| {
        Ok(match value {
            Value::String(text) => text.clone(),
            Value::Number(number) => number.to_string(),
            other => match (other.pointer("/goto/target"), other.get("drop"), other.get("prefix")) {
                (Some(target), ..) => format!("goto {}", target.as_str().unwrap_or_default()),
                (_, Some(_), _) => "drop".to_owned(),
                (.., Some(prefix)) => format!("{}/{}", prefix["addr"], prefix["len"]).replace('"', ""),
                _ => bail!("a strange part of an element: {other}"),
            },
        })
    };
    match value.get("concat").and_then(Value::as_array) {
        Some(parts) => parts.iter().map(one).collect(),
        None => Ok(vec![one(value)?]),
    }
}

fn transport(text: &str) -> Result<Transport> {
    let found = Transport::ALL.into_iter().find(|transport| transport.name().eq_ignore_ascii_case(text));
    found.with_context(|| format!("no protocol: {text}"))
}

fn frontend(key: &[String]) -> Result<Frontend> {
    match key {
        [ip, protocol, port] => Ok((Some(ip.parse()?), transport(protocol)?, port.parse()?)),
        [protocol, port] => Ok((None, transport(protocol)?, port.parse()?)),
        other => bail!("no frontend: {other:?}"),
    }
}

fn endpoint(value: &str) -> Result<SocketAddr> {
    let (ip, port) = value.split_once(" . ").with_context(|| format!("no endpoint: {value}"))?;
    Ok(SocketAddr::new(ip.parse()?, port.parse()?))
}

/// Follows the numbers of service ports to their endpoints, and records the elements used.
struct Walk<'a> {
    table: &'a Table,
    maps: BTreeMap<&'static str, BTreeMap<String, String>>,
    met: BTreeSet<(&'static str, String)>,
}

impl Walk<'_> {
    /// The endpoints that a chain chooses from for a number. `local-` chains are those of LocalSet.
    fn chosen(&mut self, number: &str, verdict: &str) -> Result<BTreeSet<SocketAddr>> {
        let chain = verdict.strip_prefix("goto ").with_context(|| format!("{number} leads to {verdict}"))?;
        let (local, kind) = chain.strip_prefix("local-").map_or((false, chain), |rest| (true, rest));
        let (slots, affine, endpoints) = match local {
            false => ("slots", "affinity-slots", "affinity-endpoints"),
            true => ("local-slots", "local-affinity-slots", "local-affinity-endpoints"),
        };
        let mut found = BTreeSet::new();
        if kind.starts_with("lb-") {
            for index in 0..self.table.count(chain, slots)? {
                found.insert(endpoint(&self.step(slots, format!("{number} . {index}"))?)?);
            }
        } else if let Some(rest) = kind.strip_prefix("affinity-") {
            let prefix = if local { "local-" } else { "" };
            let new = format!("{prefix}affinity-new-{rest}");
            for index in 0..self.table.count(&new, affine)? {
                let chosen = self.step(affine, format!("{number} . {index}"))?;
                found.insert(endpoint(&self.step(endpoints, chosen)?)?);
            }
        } else {
            bail!("{number} leads to {chain}");
        }
        Ok(found)
    }

    fn step(&mut self, map: &'static str, key: String) -> Result<String> {
        if !self.maps.contains_key(map) {
            self.maps.insert(map, self.table.map(map)?);
        }
        let value = self.maps.get(map).and_then(|map| map.get(&key).cloned());
        let value = value.with_context(|| format!("{map} has no {key}"))?;
        self.met.insert((map, key));
        Ok(value)
    }
}

/// The slot key of a number, and its choice and count, if it has any.
fn counted(output: &str) -> Result<(String, Option<String>)> {
    let (high, low) = output.split_once(':').with_context(|| format!("no number: {output}"))?;
    let bits = u32::from_str_radix(high, 16)? << 16 | u32::from_str_radix(low, 16)?;
    let text = |bits: u32| format!("{:x}:{:x}", bits >> 16, bits & 0xffff);
    let (number, class) = (bits & 0x000f_ffff, bits & 0xfff0_0000);
    Ok(match class >> 30 {
        // Count 0 of LocalSet is none.
        1 => (text(number), (class != 0x6000_0000).then(|| text(class))),
        2 | 3 => (output.to_owned(), None),
        _ => bail!("no packet can have the number {output}"),
    })
}

/// The present destinations of all frontends in the kernel.
pub(crate) fn meaning(namespace: &Namespace, family: Family) -> Result<Meaning> {
    let table = Table::read(namespace, family)?;
    let hooked: Vec<_> = table.hooks.keys().map(String::as_str).collect();
    let all = [
        "filter-forward",
        "filter-input",
        "filter-output",
        "filter-output-first",
        "filter-prerouting",
        "nat-output",
        "nat-postrouting",
        "nat-prerouting",
    ];
    ensure!(hooked == all, "the chains with hooks are {:?}", table.hooks);
    let services =
        Value::from(table.chains.get("services").context("no chain services")?.clone()).to_string();
    let mut walk = Walk { table: &table, maps: BTreeMap::new(), met: BTreeSet::new() };
    let mut meaning = Meaning::new();
    for (ports, choice) in [
        ("cluster-ip-ports", "internal-choice"),
        ("external-ports", "external-choice"),
        ("node-ports", "external-choice"),
    ] {
        ensure!(
            services.contains(&format!("\"@{ports}\"")),
            "chain services does not ask {ports}: {services}"
        );
        for (key, value) in table.set(ports)? {
            let output = value.join("");
            let (number, class) = counted(&output)?;
            let verdict = match class {
                Some(class) => walk.step("counts", class)?,
                None => walk.step(choice, output)?,
            };
            let chosen = walk.chosen(&number, &verdict)?;
            ensure!(!chosen.is_empty(), "{key:?} leads to no endpoint");
            ensure!(meaning.insert(frontend(key)?, chosen).is_none(), "{key:?} is there twice");
        }
    }
    for refused in ["refused", "refused-node-ports"] {
        for (key, value) in table.set(refused)? {
            ensure!(value == &["goto reject-it"], "{key:?} is refused by {value:?}");
            ensure!(
                meaning.insert(frontend(key)?, BTreeSet::new()).is_none(),
                "{key:?} is served and refused"
            );
        }
    }
    for map in
        ["counts", "internal-choice", "external-choice", "slots", "affinity-slots", "affinity-endpoints"]
    {
        for key in table.map(map)?.into_keys() {
            ensure!(walk.met.contains(&(map, key.clone())), "nothing leads to {key} of {map}");
        }
    }
    Ok(meaning)
}

pub(crate) fn is(namespace: &Namespace, family: Family, wanted: &Meaning) -> Result<()> {
    let found = meaning(namespace, family)?;
    if &found == wanted {
        return Ok(());
    }
    let differ = found.keys().chain(wanted.keys()).collect::<BTreeSet<_>>().into_iter();
    let differ = differ.filter(|key| found.get(key) != wanted.get(key)).take(5);
    let lines: Vec<String> = differ
        .map(|key| format!("{key:?} leads to {:?}, not to {:?}", found.get(key), wanted.get(key)))
        .collect();
    bail!("the kernel has {} frontends of {}:\n{}", found.len(), wanted.len(), lines.join("\n"))
}

/// The addresses of a map whose keys begin with one.
pub(crate) fn addresses(namespace: &Namespace, family: Family, map: &str) -> Result<Vec<IpAddr>> {
    let text = namespace.nft(&["-j", "list", "map", nft_family(family), "keelson", map])?;
    let listed: Value = serde_json::from_str(&text).context("nft -j lists no JSON")?;
    let elements = listed["nftables"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|object| object["map"]["elem"].as_array());
    let keys = elements.flatten().map(|listed| element(listed).map(|(key, _)| key));
    keys.map(|key| key?.first().context("no key")?.parse().context("no address")).collect()
}

/// The kernel's generation number of a namespace's rules.
pub(crate) fn generation(namespace: &Namespace) -> Result<u32> {
    let socket = namespace.run(|| {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        socket.bind_auto()?;
        Ok::<_, std::io::Error>(socket)
    })?;
    let socket = socket.context("cannot open a netlink socket")?;
    let mut header = NetlinkHeader::default();
    (header.flags, header.sequence_number) = (NLM_F_REQUEST, 1);
    let question = NfTablesMessage::GetGen(GenMessage { attributes: Vec::new() });
    let inner = NetfilterMessage::new(NetfilterHeader::new(NetfilterProtoFamily::Unspec, 0, 0), question);
    let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(inner));
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.send_to(&bytes, &NetlinkAddress::new(0, 0), 0).context("cannot ask nf_tables")?;
    let mut answer = Vec::with_capacity(64 * 1024);
    socket.recv(&mut answer, 0).context("nf_tables does not answer")?;
    let message = NetlinkMessage::<NetfilterMessage>::deserialize(&answer).context("no message")?;
    let NetlinkPayload::InnerMessage(NetfilterMessage {
        inner: NetfilterMessageInner::NfTables(NfTablesMessage::NewGen(generation)),
        ..
    }) = message.payload
    else {
        bail!("nf_tables did not return its generation: {:?}", message.payload)
    };
    let id = generation.attributes.iter().find_map(|attribute| match attribute {
        GenAttribute::Id(id) => Some(*id),
        _ => None,
    });
    id.context("a generation without a number")
}

mod tests {
    //! The reference itself is tested: it must detect wrong tables.

    use super::*;
    use crate::common::TestEnv;
    use crate::model::{Service, meaning, pool};
    use crate::traffic::Traffic;

    /// Fails unless the reference rejects the table after `change`, with an error that contains `words`; reverts it.
    fn is_seen(node: &Namespace, wanted: &Meaning, change: &str, back: &str, words: &str) -> Result<()> {
        for part in change.split(';') {
            node.nft(&[part])?;
        }
        let found = is(node, Family::V4, wanted);
        node.nft(&[back])?;
        let output = format!("{:#}", found.err().with_context(|| format!("{change} is not seen"))?);
        ensure!(output.contains(words), "{change}: {output}");
        is(node, Family::V4, wanted)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_wrong_table_is_seen_by_the_reference_and_by_clients() -> Result<()> {
        let pool = pool(Family::V4, 8080);
        let mut affine = Service::new(2, Family::V4, &pool[4..6]);
        affine.affinity = Some(60);
        let services = [Service::new(1, Family::V4, &pool[..3]), affine];
        let mut env = TestEnv::started(&services).await?;
        // So that nothing repairs it.
        env.proxy.kill9()?;
        let (node, wanted) = (env.world.node(), meaning(&services, Family::V4));
        is(node, Family::V4, &wanted)?;
        let element = |map: &str, element: &str| format!("element ip keelson {map} {{ {element} }}");
        let number = Table::read(node, Family::V4)?.map("cluster-ip-ports")?;
        let output = number.get(&format!("{} . tcp . 80", services[0].ip())).context("no number")?.clone();
        let (number, class) = counted(&output)?;
        let class = class.context("no count")?;
        let first = Table::read(node, Family::V4)?.map("slots")?;
        let key = format!("{number} . 0");
        let own = element("slots", &format!("{key} : {}", first.get(&key).context("no first place")?));
        let wrong = element("slots", &format!("{key} : {} . 8081", pool[7].ip()));
        let more = element("slots", &format!("{number} . 3 : {} . 8080", pool[7].ip()));
        let v = element("cluster-ip-ports", &format!("{} . tcp . 80 : {output}", services[0].ip()));
        let other = element("counts", &format!("{class} : goto lb-3"));
        for (change, back, words) in [
            (format!("delete {own}"), format!("add {own}"), "slots has no"),
            (format!("add {more}"), format!("delete {more}"), "nothing leads to"),
            (format!("delete {v}"), format!("add {v}"), "nothing leads to"),
            (format!("delete {other}"), format!("add {other}"), "counts has no"),
        ] {
            is_seen(node, &wanted, &change, &back, words)?;
        }
        let traffic = Traffic::start(&env.world, &services[..1])?;
        traffic.wait_for_answers().await?;
        node.nft(&[&format!("delete {own}")])?;
        node.nft(&[&format!("add {wrong}")])?;
        ensure!(is(node, Family::V4, &wanted).is_err(), "another endpoint is not seen");
        let mut failed = traffic.finish().await;
        while failed.is_ok() {
            // By chance no connection met the wrong one.
            failed = Traffic::start(&env.world, &services[..1])?.finish().await;
        }
        let output = format!("{failed:?}");
        ensure!(output.contains(&format!("{}:8081", pool[7].ip())), "{output}");
        Ok(())
    }
}
