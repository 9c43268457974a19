//! Owns the schema versions of the records. In: all records of an older store. Out: those of the next version. Steps
//! are pure; [`crate::open`] makes a migration atomic: it writes the result into a new generation and then switches
//! to it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::table::{Table, hex, printable_key};

pub const SCHEMA_VERSION: u32 = 2;
pub(crate) const OLDEST_VERSION: u32 = 1;
/// Stores of this version and later are sealed.
pub(crate) const SEALED_SINCE: u32 = 2;

/// All records of a store, by key on disk.
pub(crate) type Records = BTreeMap<Vec<u8>, Vec<u8>>;

struct Step {
    from: u32,
    run: fn(&mut View<'_>),
}

const STEPS: &[Step] = &[Step { from: 1, run: pulls_by_number }];

pub(crate) fn migrate(records: &mut Records, from: u32) {
    for step in STEPS.iter().filter(|step| step.from >= from) {
        tracing::info!(from = step.from, to = step.from + 1, "migrating the state store");
        (step.run)(&mut View { records, from: step.from });
    }
}

struct View<'a> {
    records: &'a mut Records,
    from: u32,
}

impl View<'_> {
    /// Removes and returns all records of a table.
    fn take(&mut self, table: Table) -> Vec<(Vec<u8>, Vec<u8>)> {
        let mut of_table = self.records.split_off(&vec![table.tag()]);
        self.records.append(&mut of_table.split_off(&vec![table.tag() + 1]));
        of_table.into_iter().map(|(key, value)| (key[1..].to_vec(), value)).collect()
    }

    fn put(&mut self, table: Table, key: &[u8], value: Vec<u8>) {
        self.records.insert(table.raw_key(key), value);
    }

    /// Keeps a record that cannot be migrated under a key that no reader uses, for manual inspection.
    fn set_aside(&mut self, table: Table, key: &[u8], value: Vec<u8>, reason: &str) {
        let kept_as = format!("unmigrated/{}/{}/{}", self.from, table.name(), hex(key));
        tracing::error!(
            table = table.name(),
            key = printable_key(key),
            reason,
            kept_as,
            "cannot migrate a record of the state store; keeping it in table meta"
        );
        self.put(Table::Meta, kept_as.as_bytes(), value);
    }
}

#[derive(Deserialize)]
struct PullV1 {
    image: String,
    handler: String,
    queued_at_ms: u64,
}

#[derive(Serialize)]
struct PullV2<'a> {
    id: u64,
    image: &'a str,
    runtime_handler: &'a str,
    requested_unix_ms: u64,
    attempts: u32,
    with_credentials: bool,
    state: &'static str,
}

/// 1 to 2: pulls are keyed by a big-endian number, so that their order is that of the queue, and have more fields.
fn pulls_by_number(view: &mut View<'_>) {
    for (key, value) in view.take(Table::Pulls) {
        match pull_to_v2(&key, &value) {
            Ok((id, json)) => view.put(Table::Pulls, &id.to_be_bytes(), json),
            Err(reason) => view.set_aside(Table::Pulls, &key, value, &reason),
        }
    }
}

fn pull_to_v2(key: &[u8], value: &[u8]) -> Result<(u64, Vec<u8>), String> {
    let id = std::str::from_utf8(key).ok().and_then(|text| text.parse::<u64>().ok());
    let id = id.ok_or("the key is not a decimal number")?;
    let old: PullV1 = serde_json::from_slice(value).map_err(|error| error.to_string())?;
    let new = PullV2 {
        id,
        image: &old.image,
        runtime_handler: &old.handler,
        requested_unix_ms: old.queued_at_ms,
        attempts: 0,
        with_credentials: false,
        state: "queued",
    };
    Ok((id, serde_json::to_vec(&new).map_err(|error| error.to_string())?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_steps_lead_from_the_oldest_version_to_the_current_one() {
        let steps: Vec<u32> = STEPS.iter().map(|step| step.from).collect();
        assert_eq!(steps, (OLDEST_VERSION..SCHEMA_VERSION).collect::<Vec<_>>());
    }

    #[test]
    fn pulls_are_rewritten_in_the_order_of_their_numbers_and_other_tables_stay() {
        let mut records = Records::new();
        let pull = |image: &str| format!(r#"{{"image":"{image}","handler":"kata","queued_at_ms":5}}"#);
        for id in [9, 10, 100] {
            records.insert(Table::Pulls.raw_key(id.to_string().as_bytes()), pull(&format!("i{id}")).into());
        }
        records.insert(Table::Leases.raw_key(b"x"), b"kept".to_vec());
        records.insert(Table::Meta.raw_key(b"x"), b"kept too".to_vec());
        migrate(&mut records, 1);
        let mut view = View { records: &mut records, from: 2 };
        let pulls = view.take(Table::Pulls);
        let ids: Vec<u64> =
            pulls.iter().map(|(key, _)| u64::from_be_bytes(key.as_slice().try_into().unwrap())).collect();
        assert_eq!(ids, [9, 10, 100]);
        assert_eq!(
            String::from_utf8(pulls[1].1.clone()).unwrap(),
            r#"{"id":10,"image":"i10","runtime_handler":"kata","requested_unix_ms":5,"attempts":0,"with_credentials":false,"state":"queued"}"#
        );
        assert_eq!(view.take(Table::Leases), [(b"x".to_vec(), b"kept".to_vec())]);
        assert_eq!(view.take(Table::Meta), [(b"x".to_vec(), b"kept too".to_vec())]);
    }

    #[test]
    fn records_that_cannot_be_migrated_are_kept_unchanged() {
        let mut records = Records::new();
        records.insert(Table::Pulls.raw_key(b"seven"), b"{}".to_vec());
        records.insert(Table::Pulls.raw_key(b"8"), b"not json".to_vec());
        migrate(&mut records, 1);
        let kept: Vec<(&[u8], &[u8])> = records.iter().map(|(k, v)| (&k[1..], &v[..])).collect();
        assert_eq!(
            kept,
            [
                (&b"unmigrated/1/pulls/38"[..], &b"not json"[..]),
                (&b"unmigrated/1/pulls/736576656e"[..], &b"{}"[..])
            ]
        );
    }
}
