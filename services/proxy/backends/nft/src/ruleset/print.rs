//! Prints the table as text.
//!
//! Owns: the form that `nft -f` reads. In: [`Base`], chains and elements. Out: text, written piece by piece: there may
//! be many elements.

use std::{
    collections::BTreeSet,
    fmt::{self, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use keelson_proxy::model::{Family, Protocol};

use super::{
    Base, FLOWTABLE, TABLE,
    definition::{DataFields, FieldType, data_fields, definition, key_fields, type_text},
    hook,
    rule::keyword,
    rules,
};
use crate::{
    chain::Chain,
    element::{Element, Number, SetName, Value, Verdict},
};

/// Elements per command: nft parses a command as a whole.
const ELEMENTS_PER_COMMAND: usize = 1000;

/// The table in the language of nft, for `nft -f`, which replaces any existing table.
///
/// `chains` are all chains, [`Chain::FIXED`] included; a chain comes after those it refers to. Elements of one set
/// should be consecutive; their order does not matter otherwise, because the file is one transaction. The affinity
/// chains in IPv6 need nft 1.0.7: see [`super::Rule::text`]. `devices`: those of the flowtable, if there is one.
pub fn print_with_flowtable(
    out: &mut impl Write,
    base: &Base,
    devices: Option<&BTreeSet<String>>,
    chains: impl IntoIterator<Item = Chain>,
    elements: impl Iterator<Item = Element>,
) -> fmt::Result {
    let ip = keyword(base.family);
    writeln!(out, "table {ip} {TABLE} {{}}\ndelete table {ip} {TABLE}\ntable {ip} {TABLE} {{")?;
    for set in SetName::ALL {
        print_set(out, base.family, set)?;
    }
    if let Some(devices) = devices {
        out.write_str(&flowtable_text(devices))?;
    }
    for chain in chains {
        writeln!(out, "\tchain {chain} {{")?;
        if let Some(hook) = hook(chain) {
            writeln!(out, "\t\t{}", hook.text)?;
        }
        for rule in rules(base, chain) {
            writeln!(out, "\t\t{}", rule.text(base.family))?;
        }
        writeln!(out, "\t}}")?;
    }
    writeln!(out, "}}")?;
    print_elements(out, base.family, elements)
}

#[must_use]
pub fn flowtable_text(devices: &BTreeSet<String>) -> String {
    let names: Vec<String> = devices.iter().map(|device| format!("\"{device}\"")).collect();
    // nft accepts no empty list.
    let devices =
        if names.is_empty() { String::new() } else { format!("\t\tdevices = {{ {} }}\n", names.join(", ")) };
    format!("\tflowtable {FLOWTABLE} {{\n\t\thook ingress priority filter\n{devices}\t\tcounter\n\t}}\n")
}

fn print_set(out: &mut impl Write, family: Family, set: SetName) -> fmt::Result {
    let word = if data_fields(set).is_some() { "map" } else { "set" };
    writeln!(out, "\t{word} {set} {{\n\t\t{}", type_text(family, set))?;
    if let Some(size) = definition(family, set).size {
        writeln!(out, "\t\tsize {size}")?;
    }
    if set.is_dynamic() {
        writeln!(out, "\t\tflags dynamic,timeout")?;
    }
    if set.is_interval() {
        writeln!(out, "\t\tflags interval")?;
    }
    writeln!(out, "\t}}")
}

fn print_elements(
    out: &mut impl Write,
    family: Family,
    elements: impl Iterator<Item = Element>,
) -> fmt::Result {
    let mut open: Option<(SetName, usize)> = None;
    for element in elements {
        match &mut open {
            Some((set, count)) if *set == element.set && *count < ELEMENTS_PER_COMMAND => {
                *count += 1;
                out.write_str(",\n\t")?;
            }
            _ => {
                if open.is_some() {
                    out.write_str("\n}\n")?;
                }
                write!(out, "add element {} {TABLE} {} {{\n\t", keyword(family), element.set)?;
                open = Some((element.set, 1));
            }
        }
        out.write_str(&element_text(family, &element))?;
    }
    match open {
        Some(_) => out.write_str("\n}\n"),
        None => Ok(()),
    }
}

/// An element in the language of nft, such as `10.96.0.10 . tcp . 80 : 40a0:7`.
#[must_use]
pub fn element_text(family: Family, element: &Element) -> String {
    let last = element.key_end.as_ref().unwrap_or(&element.key);
    let key = fields_text(family, key_fields(element.set), element.key.as_slice(), last.as_slice());
    match (&element.value, data_fields(element.set)) {
        (Value::Verdict(Verdict::Drop), _) => format!("{key} : drop"),
        (Value::Verdict(Verdict::Goto(chain)), _) => format!("{key} : goto {chain}"),
        (Value::Data(data), Some(DataFields::Data(fields))) => {
            format!("{key} : {}", fields_text(family, fields, data.as_slice(), data.as_slice()))
        }
        // A set, or an invalid value for this map.
        (Value::None | Value::Data(_), _) => key,
    }
}

/// Fields from the first to the last of their values, which are usually equal.
fn fields_text(family: Family, fields: &[FieldType], mut first: &[u8], mut last: &[u8]) -> String {
    let mut text = String::new();
    for field in fields {
        let len = field.padded_len(family) as usize;
        // A key that is too short for the set is shown as far as possible.
        let (Some((low, low_rest)), Some((high, high_rest))) =
            (first.split_at_checked(len), last.split_at_checked(len))
        else {
            break;
        };
        if !text.is_empty() {
            text.push_str(" . ");
        }
        text.push_str(&field_text(*field, low, high));
        (first, last) = (low_rest, high_rest);
    }
    text
}

fn field_text(field: FieldType, low: &[u8], high: &[u8]) -> String {
    match (field, low) {
        (FieldType::Address, _) => match (address(low), address(high)) {
            (Some(low), Some(high)) => range_text(low, high),
            _ => String::new(),
        },
        (FieldType::Protocol, [number, ..]) => match Protocol::from_number(*number) {
            Some(protocol) => protocol.keyword().to_owned(),
            None => number.to_string(),
        },
        (FieldType::Port, [high, low, ..]) => u16::from_be_bytes([*high, *low]).to_string(),
        (FieldType::Index, &[a, b, c, d]) => u32::from_ne_bytes([a, b, c, d]).to_string(),
        (FieldType::Number, &[a, b, c, d]) => Number(u32::from_ne_bytes([a, b, c, d])).to_string(),
        _ => String::new(),
    }
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    if let Ok(bytes) = <[u8; 4]>::try_from(bytes) {
        return Some(Ipv4Addr::from(bytes).into());
    }
    <[u8; 16]>::try_from(bytes).ok().map(|bytes| Ipv6Addr::from(bytes).into())
}

/// An address, a network, or an interval of addresses.
fn range_text(first: IpAddr, last: IpAddr) -> String {
    if first == last {
        return first.to_string();
    }
    let networks = (0..=128).filter_map(|prefix| IpNet::new(first, prefix).ok());
    let same = |net: &IpNet| net.network() == first && net.broadcast() == last;
    match networks.into_iter().find(same) {
        Some(net) => net.to_string(),
        None => format!("{first}-{last}"),
    }
}
