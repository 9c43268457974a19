//! The objects of all files.
//!
//! Owns: [`Catalog`]: the last valid version of every file, which file has precedence if two have an object of one
//! name, and what has changed since the last changes were taken. In: the objects of a file. Out: [`Change`]s for every
//! kind. No I/O.
//!
//! Of objects of one name, that of the file whose name sorts first is used. This depends only on the contents of the
//! files, not on the order of writes.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use keelson_endpoint_publisher::SourceKind;

use super::{
    document::Fault,
    object::{self, Body, Change, Key, Object},
};

/// Name of a file in the folder.
pub(super) type FileName = Arc<str>;

#[derive(Debug)]
struct Stored {
    line: u32,
    body: Body,
}

#[derive(Debug, Default)]
pub(super) struct Catalog {
    files: BTreeMap<FileName, BTreeMap<Key, Stored>>,
    /// The files that have an object of the name.
    owners: BTreeMap<Key, BTreeSet<FileName>>,
    /// Names that occur in more than one file.
    contested: BTreeSet<Key>,
    /// Missing files, perhaps only for a moment. Their objects are used if no other file has them.
    leaving: BTreeSet<FileName>,
    /// The object of each name that may have changed, as of the last time changes were taken.
    before: BTreeMap<Key, Option<Body>>,
}

impl Catalog {
    fn winner(&self, key: &Key) -> Option<(&FileName, &Stored)> {
        let owners = self.owners.get(key)?;
        let present = owners.iter().find(|file| !self.leaving.contains(*file));
        let file = present.or_else(|| owners.first())?;
        Some((file, self.files.get(file)?.get(key)?))
    }

    fn touch(&mut self, key: &Key) {
        if !self.before.contains_key(key) {
            let body = self.winner(key).map(|(_, stored)| stored.body.clone());
            self.before.insert(key.clone(), body);
        }
    }

    /// Whether a file has a valid version.
    pub(super) fn has(&self, file: &str) -> bool {
        self.files.contains_key(file)
    }

    pub(super) fn set(&mut self, file: &FileName, objects: Vec<Object>) {
        self.remove(file);
        let mut kept = BTreeMap::new();
        for Object { key, line, body } in objects {
            self.touch(&key);
            let owners = self.owners.entry(key.clone()).or_default();
            owners.insert(file.clone());
            if owners.len() > 1 {
                self.contested.insert(key.clone());
            }
            kept.insert(key, Stored { line, body });
        }
        self.files.insert(file.clone(), kept);
    }

    pub(super) fn remove(&mut self, file: &FileName) {
        let keys: Vec<Key> = self.files.get(file).into_iter().flat_map(BTreeMap::keys).cloned().collect();
        for key in keys {
            self.touch(&key);
            if let Some(owners) = self.owners.get_mut(&key) {
                owners.remove(file);
                if owners.len() < 2 {
                    self.contested.remove(&key);
                }
                if owners.is_empty() {
                    self.owners.remove(&key);
                }
            }
        }
        self.files.remove(file);
        self.leaving.remove(file);
    }

    /// Marks a file as missing, perhaps only for a moment, or as present.
    pub(super) fn set_leaving(&mut self, file: &FileName, leaving: bool) {
        if self.leaving.contains(file) == leaving {
            return;
        }
        let of_file = self.files.get(file);
        let keys: Vec<Key> = of_file
            .into_iter()
            .flat_map(BTreeMap::keys)
            .filter(|key| self.contested.contains(*key))
            .cloned()
            .collect();
        keys.iter().for_each(|key| self.touch(key));
        if leaving {
            self.leaving.insert(file.clone());
        } else {
            self.leaving.remove(file);
        }
    }

    /// Takes the changes since the last call, by kind. Kinds without a change are left out.
    pub(super) fn changes(&mut self) -> BTreeMap<SourceKind, Vec<Change>> {
        let mut changes: BTreeMap<SourceKind, Vec<Change>> = BTreeMap::new();
        for (key, before) in std::mem::take(&mut self.before) {
            let now = self.winner(&key).map(|(_, stored)| stored.body.clone());
            if now != before {
                changes.entry(key.0).or_default().push(Change::Object(key.1, now));
            }
        }
        changes
    }

    pub(super) fn all(&self, kind: SourceKind) -> Vec<Change> {
        let of_kind = self.owners.keys().filter(|key| key.0 == kind);
        let objects = of_kind.filter_map(|key| {
            let body = self.winner(key)?.1.body.clone();
            Some(Change::Object(key.1.clone(), Some(body)))
        });
        objects.collect()
    }

    /// Objects that are not used, because a file that sorts first has one of the same name.
    pub(super) fn shadowed_objects(&self) -> Vec<(FileName, Fault)> {
        let mut faults = Vec::new();
        for key in &self.contested {
            let Some((winner, _)) = self.winner(key) else { continue };
            for file in self.owners.get(key).into_iter().flatten() {
                if file == winner || self.leaving.contains(file) {
                    continue;
                }
                let line =
                    self.files.get(file).and_then(|objects| objects.get(key)).map_or(0, |stored| stored.line);
                let reason = format!(
                    "{} {} is also defined in {winner}, which takes precedence",
                    object::kind_name(key.0),
                    key.1.as_str().trim_start_matches('/'),
                );
                faults.push((file.clone(), Fault { line, reason }));
            }
        }
        faults
    }
}
