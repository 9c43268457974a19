//! The whole table as text.
//!
//! Owns: the form that `nft -f` reads. In: [`Base`], chains and elements. Out: text, written as it is made: the elements may be
//! many.

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

/// Elements in one command: nft reads a command whole.
const ELEMENTS_PER_COMMAND: usize = 1000;

/// The whole table in the language of nft, for `nft -f`, which replaces the table whatever it was.
///
/// `chains` are all that there are, [`Chain::FIXED`] included; a chain comes after those it leads to. Elements of one set
/// should follow each other; the order in which packets would meet them does not matter, as the file is one transaction.
/// For the chains of affinity in IPv6 it takes nft 1.0.7: see [`super::Rule::text`]. `devices`: those of the flowtable, if there
/// is one.
///
/// # Errors
///
/// When `out` has one.
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

/// The flowtable in the language of nft.
#[must_use]
pub fn flowtable_text(devices: &BTreeSet<String>) -> String {
    let names: Vec<String> = devices.iter().map(|device| format!("\"{device}\"")).collect();
    // nft reads no empty list.
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
        // A set, or what is no value of this map.
        (Value::None | Value::Data(_), _) => key,
    }
}

/// Fields from the first to the last of their values, which are mostly the same.
fn fields_text(family: Family, fields: &[FieldType], mut first: &[u8], mut last: &[u8]) -> String {
    let mut text = String::new();
    for field in fields {
        let len = field.padded_len(family) as usize;
        // A key that is shorter than those of its set is shown as far as it goes.
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

/// An address, a network, or from one address to another.
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
