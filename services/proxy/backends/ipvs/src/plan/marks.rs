//! Marks of packets that lead to virtual servers by mark.
//!
//! Owns: [`Marks`]. In: service ports that need one. Out: a number for each, and where it is in the mark of a packet.
//!
//! Numbers are made with SHA-256 from the name of the service port, so that they are the same after a restart unless two
//! names collide.

use std::collections::{BTreeMap, HashMap};

use keelson_proxy::model::PortName;
use keelson_proxy_xtables::names::{hash, port_text};

/// Bits of a number.
const BITS: u32 = 14;
const COUNT: u32 = 1 << BITS;

/// Bits of the mark that have the number. The bit for masquerading is not among them: the low ones, which other programs
/// use least, if there is room.
pub(crate) fn field(masquerade: u32) -> u32 {
    let bit = masquerade.trailing_zeros();
    let shift = if bit >= BITS { 0 } else { bit + 1 };
    (COUNT - 1) << shift
}

#[derive(Debug, Default)]
pub(crate) struct Marks {
    numbers: BTreeMap<PortName, u32>,
    names: HashMap<u32, PortName>,
}

impl Marks {
    /// Gives a number; `false`: there is none left.
    pub(crate) fn add(&mut self, name: &PortName) -> bool {
        if self.numbers.contains_key(name) {
            return true;
        }
        if self.names.len() + 1 >= COUNT as usize {
            return false;
        }
        let text = hash(&port_text(name));
        let first = text.bytes().fold(0_u32, |sum, byte| sum.wrapping_mul(33).wrapping_add(byte.into()));
        // 0 is a packet without a mark.
        let number = (0..COUNT)
            .map(|step| first.wrapping_add(step) % COUNT)
            .find(|number| *number != 0 && !self.names.contains_key(number));
        let Some(number) = number else { return false };
        self.numbers.insert(name.clone(), number);
        self.names.insert(number, name.clone());
        true
    }

    pub(crate) fn remove(&mut self, name: &PortName) {
        if let Some(number) = self.numbers.remove(name) {
            self.names.remove(&number);
        }
    }

    /// The mark of packets to a service port, without the bit for masquerading.
    pub(crate) fn mark(&self, name: &PortName, masquerade: u32) -> Option<u32> {
        Some(self.numbers.get(name)? << field(masquerade).trailing_zeros())
    }

    /// The service port of a mark, with or without the bit for masquerading.
    pub(crate) fn name(&self, mark: u32, masquerade: u32) -> Option<&PortName> {
        self.names.get(&((mark & !masquerade) >> field(masquerade).trailing_zeros()))
    }

    /// All marks, without the bit for masquerading.
    pub(crate) fn marks(&self, masquerade: u32) -> impl Iterator<Item = u32> + '_ {
        let shift = field(masquerade).trailing_zeros();
        self.numbers.values().map(move |number| number << shift)
    }
}

#[cfg(test)]
mod tests {
    use keelson_client::ServiceName;
    use keelson_proxy::model::Protocol;

    use super::*;

    fn name(number: usize) -> PortName {
        let service = ServiceName::new("default", &format!("service-{number}"));
        PortName { service, port: "".into(), protocol: Protocol::Tcp }
    }

    #[test]
    fn the_field_leaves_the_bit_for_masquerading() {
        for bit in 0..32 {
            let masquerade = 1_u32 << bit;
            assert_eq!((field(masquerade) & masquerade, field(masquerade).count_ones()), (0, BITS), "{bit}");
        }
        assert_eq!(field(0x4000), 0x3fff);
    }

    #[test]
    fn numbers_differ_and_are_found_again() {
        let mut marks = Marks::default();
        for masquerade in [0x4000, 1, 1 << 31] {
            for number in 0..2_000 {
                assert!(marks.add(&name(number)));
                let mark = marks.mark(&name(number), masquerade).unwrap();
                assert_ne!(mark, 0);
                for mark in [mark, mark | masquerade] {
                    assert_eq!(marks.name(mark, masquerade), Some(&name(number)));
                }
            }
        }
        assert_eq!(marks.marks(1).count(), 2_000);
        let before = marks.mark(&name(7), 0x4000);
        let mut other = Marks::default();
        assert!(other.add(&name(7)));
        assert_eq!(other.mark(&name(7), 0x4000), before, "the same in every run");
        marks.remove(&name(7));
        assert_eq!(marks.mark(&name(7), 0x4000), None);
    }

    #[test]
    fn numbers_end() {
        let mut marks = Marks::default();
        let given = (0..20_000).filter(|number| marks.add(&name(*number))).count();
        assert_eq!(given, COUNT as usize - 1);
    }
}
