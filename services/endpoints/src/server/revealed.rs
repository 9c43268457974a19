//! What calls reveal to the rest of the agent.
//!
//! Owns: [`Revealed`]. In: each call's position, and the newest state. Out: whether somebody follows, and whether somebody has
//! a revision that was not made here.

use super::plan::Position;

/// What calls of either API have revealed since the server was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Revealed {
    /// There was a call.
    pub followed: bool,
    /// Instance ID and revision of a caller that has a later revision of the newest state's instance: the state on disk was
    /// restored from a backup. The last of them.
    pub later: Option<(u64, u64)>,
}

impl Revealed {
    /// Adds a call; true if that says something new.
    pub(super) fn add(&mut self, asked: Option<Position>, newest: Option<Position>) -> bool {
        let before = *self;
        self.followed = true;
        if let (Some(asked), Some(newest)) = (asked, newest)
            && asked.instance_id == newest.instance_id
            && asked.rev > newest.rev
        {
            self.later = Some((asked.instance_id, asked.rev));
        }
        before != *self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e12_only_a_later_revision_of_the_same_instance_is_one_that_was_not_made_here() {
        let at = |instance_id, rev| Some(Position { instance_id, rev });
        for (asked, newest, later) in [
            (None, at(7, 5), None),
            (at(7, 5), None, None),
            (at(7, 5), at(7, 5), None),
            (at(7, 4), at(7, 5), None),
            (at(8, 9), at(7, 5), None),
            (at(7, 6), at(7, 5), Some((7, 6))),
        ] {
            let mut revealed = Revealed::default();
            assert!(revealed.add(asked, newest));
            assert_eq!(revealed, Revealed { followed: true, later }, "{asked:?} at {newest:?}");
            assert!(!revealed.add(asked, newest), "nothing new");
            revealed.add(None, newest);
            assert_eq!(revealed.later, later, "it stays");
        }
    }
}
