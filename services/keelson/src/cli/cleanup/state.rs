//! The agent's files on the node, and detection of a running agent.
//!
//! Owns: nothing. In: the paths of the settings. Out: removes sockets and state folder; the signs of a running agent.

use std::{
    fs::{self, File, TryLockError},
    io,
    path::Path,
};

use keelson_config::Settings;
use tokio::net::UnixStream;

use super::report::{Outcome, Report};
use crate::agent::endpoints::marker_path;

const SOCKET: &str = "socket";
const STATE: &str = "state folder";
const NOTED_REVISION: &str = "noted revision";

/// A sentence with the sign of a running agent that was found.
pub(super) async fn running_agent(settings: &Settings) -> Option<String> {
    let dir = &settings.agent.state_dir;
    if is_locked(&dir.join(keelson_storage::LOCK_FILE)) {
        return Some(format!("an agent is using the state directory {}", dir.display()));
    }
    for socket in [&settings.cri.listen, &settings.debug.listen] {
        if UnixStream::connect(socket.path()).await.is_ok() {
            return Some(format!("an agent or systemd is listening on {socket}"));
        }
    }
    None
}

fn is_locked(path: &Path) -> bool {
    // The lock is released when the file is dropped.
    File::open(path).is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

pub(super) fn clean(settings: &Settings, report: &mut Report) {
    for socket in [&settings.cri.listen, &settings.debug.listen] {
        let path = socket.path();
        report.remove_now(SOCKET, path, path.exists(), || fs::remove_file(path));
    }
    let noted = marker_path(settings);
    if noted.exists() {
        report.remove_now(NOTED_REVISION, &noted, true, || fs::remove_file(&noted));
    }
    let dir = &settings.agent.state_dir;
    // A folder that an agent used has its lock file; any other was configured by mistake.
    if dir.exists() && !dir.join(keelson_storage::LOCK_FILE).exists() {
        let detail = "it has no lock file, so it may not belong to an agent; remove it manually";
        return report.add(STATE, dir.display().to_string(), Outcome::Skipped, detail);
    }
    report.remove_now(STATE, dir, dir.exists(), || fs::remove_dir_all(dir));
}

impl Report {
    fn remove_now(
        &mut self,
        kind: &'static str,
        path: &Path,
        exists: bool,
        removal: impl FnOnce() -> io::Result<()>,
    ) {
        let name = path.display().to_string();
        let outcome = match (exists, self.is_dry_run()) {
            (false, _) => Outcome::Absent,
            (true, true) => Outcome::WouldRemove,
            (true, false) => match removal() {
                Ok(()) => Outcome::Removed,
                Err(error) => return self.add(kind, name, Outcome::Failed, error.to_string()),
            },
        };
        self.add(kind, name, outcome, "");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(root: &Path) -> Settings {
        let mut settings = Settings::default();
        settings.agent.state_dir = root.join("state");
        let socket = |name: &str| {
            keelson_config::SocketSpec::parse(&format!("unix://{}", root.join(name).display()))
                .expect("short")
        };
        (settings.cri.listen, settings.debug.listen) = (socket("cri.sock"), socket("debug.sock"));
        settings
    }

    #[tokio::test]
    async fn a_locked_folder_or_a_listener_is_a_running_agent() {
        let root = tempfile::tempdir().expect("a folder");
        let settings = settings(root.path());
        assert_eq!(running_agent(&settings).await, None, "nothing is there");
        fs::create_dir(&settings.agent.state_dir).expect("makes");
        let lock = File::create(settings.agent.state_dir.join(keelson_storage::LOCK_FILE)).expect("makes");
        assert_eq!(running_agent(&settings).await, None, "no process holds the lock");
        lock.lock().expect("locks");
        let found = running_agent(&settings).await.expect("it is locked");
        assert!(found.contains("using the state directory"), "{found}");
        lock.unlock().expect("unlocks");
        let _listener = tokio::net::UnixListener::bind(settings.debug.listen.path()).expect("binds");
        let found = running_agent(&settings).await.expect("it listens");
        assert!(found.contains("debug.sock"), "{found}");
    }

    #[test]
    fn only_a_folder_that_an_agent_used_is_removed() {
        let root = tempfile::tempdir().expect("a folder");
        let settings = settings(root.path());
        let dir = &settings.agent.state_dir;
        fs::create_dir(dir).expect("makes");
        fs::write(dir.join("precious"), "x").expect("writes");
        let mut report = Report::new(false);
        clean(&settings, &mut report);
        assert!(dir.exists() && !report.has_failed(), "{}", report.text());
        fs::write(dir.join(keelson_storage::LOCK_FILE), "").expect("writes");
        clean(&settings, &mut Report::new(true));
        assert!(dir.exists(), "a dry run");
        clean(&settings, &mut Report::new(false));
        assert!(!dir.exists());
    }
}
