//! Users who may make changes through the debug socket.
//!
//! Owns: the meaning of `debug.control_users`. In: its text and the user database. Out: user ids.

use std::collections::BTreeSet;

use nix::unistd::{User, geteuid};

/// Root, the agent's own user, and the users in `setting` (comma-separated names or ids). A user who does not
/// exist is left out with a warning, so that the agent starts.
pub(super) fn read(setting: &str) -> BTreeSet<u32> {
    let mut users = BTreeSet::from([0, geteuid().as_raw()]);
    for name in setting.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        match id_of(name) {
            Ok(id) => {
                users.insert(id);
            }
            Err(reason) => tracing::warn!(user = name, reason, "user in debug.control_users ignored"),
        }
    }
    users
}

fn id_of(name: &str) -> Result<u32, String> {
    if let Ok(id) = name.parse() {
        return Ok(id);
    }
    match User::from_name(name) {
        Ok(Some(user)) => Ok(user.uid.as_raw()),
        Ok(None) => Err("the user does not exist".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_ids_are_users_and_unknown_names_are_left_out() {
        let own = geteuid().as_raw();
        assert_eq!(read(""), BTreeSet::from([0, own]));
        assert_eq!(read(" 4711, root,,no-such-user-here "), BTreeSet::from([0, own, 4711]));
    }
}
