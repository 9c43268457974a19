//! Compares the kernel's rules with ours.
//!
//! Owns: [`Expression`], a normal form for rules from both sides, and [`same`]. In: lists of expressions. Out: whether
//! they are equal.
//!
//! The kernel returns more attributes of an expression than it was given: omitted ones come back with their defaults.
//! So both sides are completed with the defaults before the comparison, and everything else has to be equal.

use netlink_packet_core::Emitable;
use netlink_packet_netfilter::nftables::{ExpressionAttribute, ListAttribute};

use super::codec::{attributes, text};

/// Attributes are in the kernel's form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expression {
    /// The type of the expression, such as `lookup`.
    pub name: String,
    /// `NFTA_*` of the type, without flags, and the value.
    pub attributes: Vec<(u16, Vec<u8>)>,
}

/// `NFTA_EXPR_NAME` and `NFTA_EXPR_DATA`.
const NAME: u16 = 1;
const DATA: u16 = 2;

/// `NFTA_DATA_VALUE`, which contains bytes, unlike a verdict, which contains attributes.
const DATA_VALUE: u16 = 1;

/// Nested attributes: expression and kind. immediate: data. cmp: data. bitwise: mask, xor, data. range: from, to.
const NESTED: [(&str, u16); 7] = [
    ("immediate", 2),
    ("cmp", 3),
    ("bitwise", 4),
    ("bitwise", 5),
    ("bitwise", 7),
    ("range", 3),
    ("range", 4),
];

/// Defaults of omitted attributes: `NFTA_BITWISE_OP`, `NFTA_LOOKUP_FLAGS`, `NFTA_PAYLOAD_CSUM_TYPE`, `_OFFSET` and
/// `_FLAGS`, `NFTA_NG_OFFSET`, `NFTA_DYNSET_FLAGS` and `_TIMEOUT`, `NFTA_FIB_FLAGS`, `NFTA_NAT_FLAGS`,
/// `NFTA_MASQ_FLAGS`, `NFTA_REJECT_ICMP_CODE`. meta, ct, cmp, immediate and byteorder have no such attributes.
const DEFAULTS: [(&str, u16, &[u8]); 12] = [
    ("bitwise", 6, &[0; 4]),
    ("lookup", 5, &[0; 4]),
    ("payload", 6, &[0; 4]),
    ("payload", 7, &[0; 4]),
    ("payload", 8, &[0; 4]),
    ("numgen", 4, &[0; 4]),
    ("dynset", 6, &[0; 8]),
    ("dynset", 9, &[0; 4]),
    ("fib", 3, &[0; 4]),
    ("nat", 7, &[0; 4]),
    ("masq", 1, &[0; 4]),
    ("reject", 2, &[0]),
];

/// Ends of ranges, which default to the beginnings: of addresses (nat) and ports (nat, masq).
const RANGE_ENDS: [(&str, u16, u16); 3] = [("nat", 3, 4), ("nat", 5, 6), ("masq", 2, 3)];

/// Flags that the kernel sets itself if an attribute is present: `NF_NAT_RANGE_MAP_IPS`,
/// `NF_NAT_RANGE_PROTO_SPECIFIED`.
const IMPLIED_FLAGS: [(&str, u16, u16, u8); 3] = [("nat", 3, 7, 1), ("nat", 5, 7, 2), ("masq", 2, 1, 2)];

/// Registers: of immediate, cmp, lookup, meta, payload, bitwise, byteorder, ct, numgen, fib, nat, masq, dynset, range.
const REGISTERS: [(&str, u16); 24] = [
    ("immediate", 1),
    ("cmp", 1),
    ("lookup", 2),
    ("lookup", 3),
    ("meta", 1),
    ("meta", 3),
    ("payload", 1),
    ("payload", 5),
    ("bitwise", 1),
    ("bitwise", 2),
    ("bitwise", 8),
    ("byteorder", 1),
    ("byteorder", 2),
    ("ct", 1),
    ("ct", 4),
    ("numgen", 1),
    ("fib", 1),
    ("nat", 3),
    ("nat", 4),
    ("nat", 5),
    ("nat", 6),
    ("dynset", 4),
    ("dynset", 5),
    ("range", 1),
];

/// References to sets of the same transaction, which the kernel resolves and does not return.
const TRANSIENT: [(&str, u16); 2] = [("lookup", 4), ("dynset", 2)];

pub(super) fn same(expected: &[Expression], found: &[Expression]) -> bool {
    expected.len() == found.len()
        && expected.iter().zip(found).all(|(expected, found)| complete(expected) == complete(found))
}

/// With all defaults, in the order of kinds.
fn complete(expression: &Expression) -> Expression {
    let mut whole = expression.clone();
    let name = expression.name.as_str();
    whole.attributes.retain(|(kind, _)| !TRANSIENT.contains(&(name, *kind)));
    for (_, kind, value) in DEFAULTS.into_iter().filter(|(other, ..)| *other == name) {
        if whole.value(kind).is_none() {
            whole.attributes.push((kind, value.to_vec()));
        }
    }
    for (kind, value) in &mut whole.attributes {
        if REGISTERS.contains(&(name, *kind)) {
            large_register(value);
        }
    }
    for (_, begin, end) in RANGE_ENDS.into_iter().filter(|(other, ..)| *other == name) {
        if let (Some(value), None) = (whole.value(begin).map(<[u8]>::to_vec), whole.value(end)) {
            whole.attributes.push((end, value));
        }
    }
    for (_, cause, flags, implied) in IMPLIED_FLAGS.into_iter().filter(|(other, ..)| *other == name) {
        if whole.value(cause).is_some()
            && let Some((_, value)) = whole.attributes.iter_mut().find(|(kind, _)| *kind == flags)
            && let Some(last) = value.last_mut()
        {
            *last |= implied;
        }
    }
    whole.attributes.sort_unstable();
    whole
}

/// Every fourth register of 4 bytes has two names in the kernel (`NFT_REG32_00`, `_04`, ...), which returns the name as
/// a register of 16 bytes (`NFT_REG_1`, `_2`, ...).
fn large_register(value: &mut [u8]) {
    const FIRST_SMALL: u8 = 8;
    const SMALL_END: u8 = 24;
    if let [0, 0, 0, last] = value
        && (FIRST_SMALL..SMALL_END).contains(last)
        && *last % 4 == 0
    {
        *last = (*last - FIRST_SMALL) / 4 + 1;
    }
}

impl Expression {
    #[must_use]
    pub fn value(&self, kind: u16) -> Option<&[u8]> {
        self.attributes.iter().find(|(other, _)| *other == kind).map(|(_, value)| value.as_slice())
    }
}

pub(super) fn of_library(list: &[ListAttribute<ExpressionAttribute>]) -> Result<Vec<Expression>, String> {
    let mut bytes = vec![0; list.buffer_len()];
    list.emit(&mut bytes);
    of_bytes(&bytes)
}

/// Parses the value of `NFTA_RULE_EXPRESSIONS`.
pub(super) fn of_bytes(list: &[u8]) -> Result<Vec<Expression>, String> {
    attributes(list).map(|element| one(element?.1)).collect()
}

fn one(element: &[u8]) -> Result<Expression, String> {
    let mut expression = Expression { name: String::new(), attributes: Vec::new() };
    let mut data: &[u8] = &[];
    for attribute in attributes(element) {
        match attribute? {
            (NAME, name) => expression.name = text(name)?.to_owned(),
            (DATA, value) => data = value,
            _ => {}
        }
    }
    for attribute in attributes(data) {
        let (kind, value) = attribute?;
        let value = if NESTED.contains(&(expression.name.as_str(), kind)) {
            without_flags(value)?
        } else {
            value.to_vec()
        };
        expression.attributes.push((kind, value));
    }
    Ok(expression)
}

/// Clears the flag of nested attributes, which may or may not be set in `NFTA_*` data.
fn without_flags(data: &[u8]) -> Result<Vec<u8>, String> {
    let mut plain = Vec::with_capacity(data.len());
    for attribute in attributes(data) {
        let (kind, value) = attribute?;
        let inner = if kind == DATA_VALUE { value.to_vec() } else { flat(value)? };
        push(&mut plain, kind, &inner);
    }
    Ok(plain)
}

fn flat(list: &[u8]) -> Result<Vec<u8>, String> {
    let mut plain = Vec::with_capacity(list.len());
    for attribute in attributes(list) {
        let (kind, value) = attribute?;
        push(&mut plain, kind, value);
    }
    Ok(plain)
}

fn push(plain: &mut Vec<u8>, kind: u16, value: &[u8]) {
    plain.extend_from_slice(&kind.to_be_bytes());
    plain.extend_from_slice(&(value.len() as u32).to_be_bytes());
    plain.extend_from_slice(value);
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::DefaultNla;
    use netlink_packet_netfilter::nftables::{
        Bitwise, DataAttribute, Expressions, Immediate, Lookup, Register, Verdict, VerdictAttribute,
    };

    use super::*;

    fn expressions(list: Vec<Expressions>) -> Vec<Expression> {
        of_library(&list.into_iter().map(ListAttribute::from).collect::<Vec<_>>()).unwrap()
    }

    fn other(name: &str, attributes: &[(u16, &[u8])]) -> Expressions {
        Expressions::Other {
            expression_type: name.to_owned(),
            attributes: attributes
                .iter()
                .map(|(kind, value)| DefaultNla::new(*kind, value.to_vec()))
                .collect(),
        }
    }

    fn lookup(set: &str, more: Vec<Lookup>) -> Expressions {
        let mut attributes = vec![Lookup::Set(set.to_owned()), Lookup::SourceRegister(Register::Reg1)];
        attributes.extend(more);
        Expressions::Lookup(attributes)
    }

    #[test]
    fn defaults_that_the_kernel_adds_make_no_difference() {
        let sent = expressions(vec![
            lookup("slots", vec![Lookup::SetId(7)]),
            other("nat", &[(1, &[0, 0, 0, 1]), (2, &[0, 0, 0, 2]), (3, &[0, 0, 0, 1]), (5, &[0, 0, 0, 9])]),
            other("masq", &[(1, &[0, 0, 0, 16])]),
        ]);
        let dumped = expressions(vec![
            lookup("slots", vec![Lookup::Flags(0)]),
            other(
                "nat",
                &[
                    (1, &[0, 0, 0, 1]),
                    (2, &[0, 0, 0, 2]),
                    (3, &[0, 0, 0, 1]),
                    (4, &[0, 0, 0, 1]),
                    (5, &[0, 0, 0, 9]),
                    (6, &[0, 0, 0, 9]),
                    (7, &[0, 0, 0, 3]),
                ],
            ),
            other("masq", &[(1, &[0, 0, 0, 16])]),
        ]);
        assert!(same(&sent, &dumped));
    }

    #[test]
    fn other_differences_are_found() {
        let sent = expressions(vec![lookup("slots", vec![])]);
        for changed in [
            expressions(vec![lookup("local-slots", vec![])]),
            expressions(vec![lookup("slots", vec![Lookup::Flags(1)])]),
            expressions(vec![lookup("slots", vec![Lookup::DestinationRegister(Register::Reg1)])]),
            expressions(vec![Expressions::Lookup(vec![Lookup::Set("slots".to_owned())])]),
            expressions(vec![lookup("slots", vec![]), other("masq", &[])]),
            expressions(vec![]),
            expressions(vec![other("counter", &[])]),
        ] {
            assert!(!same(&sent, &changed), "{changed:?}");
        }
        let masked = |mask: Vec<u8>| {
            expressions(vec![Expressions::Bitwise(vec![Bitwise::Mask(DataAttribute::Value(mask))])])
        };
        assert!(same(&masked(vec![1, 0, 0, 0]), &masked(vec![1, 0, 0, 0])));
        assert!(!same(&masked(vec![1, 0, 0, 0]), &masked(vec![2, 0, 0, 0])));
    }

    #[test]
    fn marks_of_nesting_make_no_difference() {
        let marked =
            expressions(vec![Expressions::Immediate(vec![Immediate::Data(DataAttribute::Verdict(vec![
                VerdictAttribute::Code(Verdict::Goto),
                VerdictAttribute::Chain("services".to_owned()),
            ]))])]);
        // The same without the flag: data { verdict { code, chain } }.
        let verdict = [&[8, 0, 1, 0, 255, 255, 255, 252, 13, 0, 2, 0][..], b"services\0", &[0; 3]].concat();
        let data = [&[(verdict.len() + 4) as u8, 0, 2, 0][..], &verdict].concat();
        let plain = expressions(vec![other("immediate", &[(2, &data)])]);
        assert_eq!(marked, plain);
    }
}
