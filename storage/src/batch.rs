//! The batch, the unit of writing. In: puts and deletes. Out: the net writes by key.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::error::StoreError;
use crate::table::{Table, printable_key};

/// In bytes.
pub const MAX_KEY_LEN: usize = 4 * 1024;
/// In bytes.
pub const MAX_VALUE_LEN: usize = 1024 * 1024;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Op {
    pub table: Table,
    pub key: Vec<u8>,
    /// `None`: delete the record.
    pub value: Option<Vec<u8>>,
}

/// Writes that become durable together or not at all, applied in order: the last one to a key wins.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Batch {
    ops: Vec<Op>,
}

impl Batch {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn put(&mut self, table: Table, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> &mut Self {
        self.ops.push(Op { table, key: key.into(), value: Some(value.into()) });
        self
    }

    pub fn put_json<T: Serialize + ?Sized>(
        &mut self,
        table: Table,
        key: impl Into<Vec<u8>>,
        value: &T,
    ) -> Result<&mut Self, StoreError> {
        let key = key.into();
        match serde_json::to_vec(value) {
            Ok(json) => Ok(self.put(table, key, json)),
            Err(source) => Err(StoreError::Encode { table, key: printable_key(&key), source }),
        }
    }

    /// The record need not exist.
    pub fn delete(&mut self, table: Table, key: impl Into<Vec<u8>>) -> &mut Self {
        self.ops.push(Op { table, key: key.into(), value: None });
        self
    }

    pub fn extend(&mut self, other: Batch) -> &mut Self {
        self.ops.extend(other.ops);
        self
    }

    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    pub fn len(&self) -> usize {
        self.ops.len()
    }

    pub fn ops(&self) -> &[Op] {
        &self.ops
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.ops.iter().map(|op| (op.key.len() + op.value.as_ref().map_or(0, Vec::len)) as u64).sum()
    }

    pub(crate) fn check(&self) -> Result<(), StoreError> {
        for op in &self.ops {
            let (table, len) = (op.table, op.key.len());
            if len > MAX_KEY_LEN {
                return Err(StoreError::KeyTooLong { table, len, max: MAX_KEY_LEN });
            }
            let len = op.value.as_ref().map_or(0, Vec::len);
            if len > MAX_VALUE_LEN {
                let key = printable_key(&op.key);
                return Err(StoreError::ValueTooLong { table, key, len, max: MAX_VALUE_LEN });
            }
        }
        Ok(())
    }

    /// The net writes, by key on disk.
    pub(crate) fn net(&self) -> BTreeMap<Vec<u8>, Option<&[u8]>> {
        self.ops.iter().map(|op| (op.table.raw_key(&op.key), op.value.as_deref())).collect()
    }
}
