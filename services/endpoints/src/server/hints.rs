//! What calls reveal about their clients that other parts of the agent need.

use super::plan::Revision;

/// What the calls of both APIs have revealed since the server was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ClientHints {
    /// There was a call.
    pub has_followed: bool,
    /// Instance ID and revision of the last client that has a later revision of the current instance: the state on
    /// disk was restored from a backup.
    pub later_revision: Option<(u64, u64)>,
}

impl ClientHints {
    /// Adds a call; true if something is new.
    pub(super) fn add(&mut self, asked: Option<Revision>, newest: Option<Revision>) -> bool {
        let before = *self;
        self.has_followed = true;
        if let (Some(asked), Some(newest)) = (asked, newest)
            && asked.instance_id == newest.instance_id
            && asked.rev > newest.rev
        {
            self.later_revision = Some((asked.instance_id, asked.rev));
        }
        before != *self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e12_only_a_later_revision_of_the_same_instance_is_foreign() {
        let at = |instance_id, rev| Some(Revision { instance_id, rev });
        for (asked, newest, later) in [
            (None, at(7, 5), None),
            (at(7, 5), None, None),
            (at(7, 5), at(7, 5), None),
            (at(7, 4), at(7, 5), None),
            (at(8, 9), at(7, 5), None),
            (at(7, 6), at(7, 5), Some((7, 6))),
        ] {
            let mut hints = ClientHints::default();
            assert!(hints.add(asked, newest));
            assert_eq!(
                hints,
                ClientHints { has_followed: true, later_revision: later },
                "{asked:?} at {newest:?}"
            );
            assert!(!hints.add(asked, newest), "nothing new");
            hints.add(None, newest);
            assert_eq!(hints.later_revision, later, "it stays");
        }
    }
}
