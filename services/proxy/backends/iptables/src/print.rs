//! Prints the wanted state.
//!
//! Owns: [`print`]. In: the wanted state of a family. Out: text. Each part begins with a comment that names the program
//! that reads it.

use std::fmt;

use keelson_proxy::model::Family;

use crate::{changes::Wanted, save::Found};

pub(crate) fn print(family: Family, wanted: &Wanted, out: &mut dyn fmt::Write) -> fmt::Result {
    let program = match family {
        Family::V4 => "iptables-restore",
        Family::V6 => "ip6tables-restore",
    };
    let changes = wanted.changes(&Found::default(), true);
    write!(out, "# ipset restore -exist\n{}", changes.sets_before(family))?;
    write!(out, "# {program} --noflush\n{}", changes.rules(usize::MAX))
}
