//! Owns the proof that a store is complete: a record with the number of the last batch, the number of records and a
//! sum over all of them, written in the same batch as what it seals; and, beside the database, the number of the last
//! acknowledged batch.
//!
//! sled's recovery ends at the first damaged place of its log and does not report what followed. The seal detects
//! changed or missing records, the acknowledged number detects a missing tail.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

pub(crate) const INTERNAL_TAG: u8 = 0;
pub(crate) const SEAL_KEY: &[u8] = b"\x00seal";
/// The value is decimal text.
pub(crate) const SCHEMA_KEY: &[u8] = b"\x00schema_version";

const SEAL_LEN: usize = 24;
const ACKED_FILE: &str = "acked";
const ACKED_LEN: usize = 16;

/// Number and sum of all records after a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Seal {
    pub(crate) batch: u64,
    /// Without the store's own records.
    pub(crate) records: u64,
    /// Sum of the records' checksums: independent of their order, so that a batch can update it.
    pub(crate) sum: u64,
}

impl Seal {
    pub(crate) fn add(&mut self, key: &[u8], value: &[u8]) {
        self.records = self.records.wrapping_add(1);
        self.sum = self.sum.wrapping_add(record_sum(key, value));
    }

    pub(crate) fn remove(&mut self, key: &[u8], value: &[u8]) {
        self.records = self.records.wrapping_sub(1);
        self.sum = self.sum.wrapping_sub(record_sum(key, value));
    }

    pub(crate) fn to_bytes(self) -> [u8; SEAL_LEN] {
        let mut bytes = [0; SEAL_LEN];
        bytes[..8].copy_from_slice(&self.batch.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.records.to_be_bytes());
        bytes[16..].copy_from_slice(&self.sum.to_be_bytes());
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Seal> {
        let bytes: &[u8; SEAL_LEN] = bytes.try_into().ok()?;
        Some(Seal { batch: number(&bytes[..8]), records: number(&bytes[8..16]), sum: number(&bytes[16..]) })
    }
}

pub(crate) fn is_internal(key: &[u8]) -> bool {
    key.first() == Some(&INTERNAL_TAG)
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// FNV-1a with a final mix: detects accidents, not attacks. Must never change, because it is on disk.
pub(crate) fn checksum(parts: &[&[u8]]) -> u64 {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for byte in parts.iter().copied().flatten() {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^ (hash >> 33)
}

fn record_sum(key: &[u8], value: &[u8]) -> u64 {
    checksum(&[&(key.len() as u64).to_be_bytes(), key, value])
}

/// The file with the number of the last acknowledged batch.
///
/// Written after the batch is durable and not fsynced: after a power failure it may contain an older number, never
/// that of a missing batch. It costs one small write to the page cache.
#[derive(Debug)]
pub(crate) struct Acked {
    file: File,
}

impl Acked {
    pub(crate) fn open(generation: &Path) -> io::Result<Self> {
        let path = generation.join(ACKED_FILE);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        Ok(Self { file })
    }

    /// `None` if there is no number that can be trusted.
    pub(crate) fn read(&self) -> Option<u64> {
        let mut bytes = [0; ACKED_LEN];
        self.file.read_exact_at(&mut bytes, 0).ok()?;
        (number(&bytes[8..]) == checksum(&[&bytes[..8]])).then(|| number(&bytes[..8]))
    }

    pub(crate) fn write(&self, batch: u64) -> io::Result<()> {
        let mut bytes = [0; ACKED_LEN];
        bytes[..8].copy_from_slice(&batch.to_be_bytes());
        let sum = checksum(&[&bytes[..8]]);
        bytes[8..].copy_from_slice(&sum.to_be_bytes());
        self.file.write_all_at(&bytes, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_checksum_matches_existing_stores() {
        assert_eq!(checksum(&[b"keelson"]), 0x3488_a3b6_fce6_0d8d);
        assert_eq!(checksum(&[b"keel", b"son"]), checksum(&[b"keelson"]));
        assert_ne!(record_sum(b"ab", b"c"), record_sum(b"a", b"bc"));
    }

    #[test]
    fn the_acknowledged_number_survives_and_a_damaged_one_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Acked::open(dir.path()).unwrap().read(), None);
        Acked::open(dir.path()).unwrap().write(77).unwrap();
        assert_eq!(Acked::open(dir.path()).unwrap().read(), Some(77));
        let path = dir.path().join(ACKED_FILE);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[7] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(Acked::open(dir.path()).unwrap().read(), None);
    }

    proptest! {
        #[test]
        fn a_seal_does_not_depend_on_order_or_deleted_records(
            records in proptest::collection::btree_map(any::<Vec<u8>>(), any::<Vec<u8>>(), 0..20),
            passing in proptest::collection::vec((any::<Vec<u8>>(), any::<Vec<u8>>()), 0..10),
        ) {
            let (mut there, mut back) = (Seal::default(), Seal::default());
            records.iter().for_each(|(key, value)| there.add(key, value));
            passing.iter().for_each(|(key, value)| back.add(key, value));
            records.iter().rev().for_each(|(key, value)| back.add(key, value));
            passing.iter().for_each(|(key, value)| back.remove(key, value));
            prop_assert_eq!(there, back);
            prop_assert_eq!(Seal::from_bytes(&there.to_bytes()), Some(there));
        }
    }
}
