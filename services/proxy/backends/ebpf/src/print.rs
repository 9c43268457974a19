//! The maps as text.
//!
//! Owns: [`MapsText`]. In: what is wanted in the maps. Out: lines that begin with `#`, which `nft -f` skips: the text of the
//! packet level before them can be read by nft.

use std::fmt;

use keelson_proxy::model::Family;

use crate::{
    elements::{Contents, Element},
    layout::MapName,
};

pub(crate) struct MapsText {
    /// Empty for those of the socket level.
    level: &'static str,
    family: Family,
    contents: Contents,
}

impl MapsText {
    pub(crate) fn new(level: &'static str, family: Family, contents: Contents) -> Self {
        Self { level, family, contents }
    }

    pub(crate) fn print(&self, out: &mut dyn fmt::Write) -> fmt::Result {
        let Contents { slots, members, sets, frontends, node_addresses, ranges } = &self.contents;
        let mut section = |map: MapName, elements: &mut dyn Iterator<Item = Element>| {
            let mut elements = elements.peekable();
            if elements.peek().is_none() {
                return Ok(());
            }
            writeln!(out, "# {}eBPF map {} of {}", self.level, map.as_str(), self.family)?;
            elements.try_for_each(|element| writeln!(out, "#   {element}"))
        };
        section(
            MapName::NodeAddresses,
            &mut node_addresses.iter().map(|(key, value)| Element::NodeAddress(*key, *value)),
        )?;
        section(
            MapName::Frontends,
            &mut frontends.iter().map(|(key, value)| Element::Frontend(*key, *value)),
        )?;
        section(MapName::SourceRanges, &mut ranges.iter().map(|(key, value)| Element::Range(*key, *value)))?;
        section(MapName::Sets, &mut sets.iter().map(|(key, value)| Element::Set(*key, *value)))?;
        section(MapName::Slots, &mut slots.iter().map(|(key, value)| Element::Slot(*key, *value)))?;
        section(MapName::Members, &mut members.iter().map(|(key, bits)| Element::Member(*key, *bits)))
    }
}
