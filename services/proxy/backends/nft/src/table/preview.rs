//! Describes the changes of a table.
//!
//! In: a [`Difference`]. Out: lines of `keelson proxy --dry-run`.

use keelson_proxy::model::Family;

use super::Difference;
use crate::{
    element::{Element, Op},
    kernel::Change,
    ruleset::{FLOWTABLE, element_text},
};

impl Difference {
    /// One line per change.
    pub(crate) fn lines(&self, family: Family) -> Vec<String> {
        let table = match family {
            Family::V4 => "ip keelson",
            Family::V6 => "ip6 keelson",
        };
        let mut lines = Vec::new();
        if self.absent {
            lines.push(format!("add table {table}"));
        }
        if self.rebuild {
            lines.push(format!("replace table {table}: it cannot be repaired in place"));
        }
        let structure = self.first.iter().chain(&self.last).chain(&self.devices);
        lines.extend(structure.filter_map(|change| change_line(table, change)));
        lines.extend(self.prepared.iter().map(|chain| format!("add chain {table} {chain}")));
        let element = |verb: &str, element: &Element| {
            format!("{verb} element {table} {} {{ {} }}", element.set, element_text(family, element))
        };
        for op in &self.ops {
            match op {
                Op::Add(added) => lines.push(element("add", added)),
                Op::Delete(deleted) => lines.push(element("delete", deleted)),
                Op::Replace(deleted, added) => {
                    lines.extend([element("delete", deleted), element("add", added)]);
                }
            }
        }
        lines
    }
}

fn change_line(table: &str, change: &Change) -> Option<String> {
    Some(match change {
        Change::MakeSet(set) => format!("add set {table} {set}"),
        Change::MakeChain(chain) => format!("add chain {table} {chain}"),
        Change::Rules(chain, rules) => format!("write the {} rules of chain {table} {chain}", rules.len()),
        Change::DeleteChain(chain) => format!("delete chain {table} {chain}"),
        Change::DeleteChainNamed(name) => format!("delete chain {table} {name}"),
        Change::DeleteSetNamed(name) => format!("delete set {table} {name}"),
        Change::MakeFlowtable => format!("add flowtable {table} {FLOWTABLE}"),
        Change::DeleteFlowtable(name) => format!("delete flowtable {table} {name}"),
        Change::AddDevices(names) => format!("add {} to flowtable {table} {FLOWTABLE}", names.join(", ")),
        Change::RemoveDevices(names) => {
            format!("remove {} from flowtable {table} {FLOWTABLE}", names.join(", "))
        }
        Change::MakeTable | Change::DeleteTable | Change::Element(_) => return None,
    })
}
