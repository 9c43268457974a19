//! Unix sockets: binding them, and replacing files of processes that are gone.
//!
//! Owns: the socket file of a listener. In: a path. Out: [`Bound`], which removes its file when it is
//! dropped, if the file is still its own. A socket is bound under a temporary name and renamed into place,
//! so that a client never finds a file that no process listens on yet.

use std::{
    fs, io,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use std::time::Duration;

use tokio::{
    net::{UnixListener, UnixStream},
    time::Instant,
};

/// Pause between two attempts to listen.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another process listens there.
    #[error("{path}: another process is listening on this socket; stop it or use another path", path = .0.display())]
    InUse(PathBuf),
    #[error("{path}: the file exists and is not a socket; remove it or use another path", path = .0.display())]
    NotASocket(PathBuf),
    #[error("{path}: cannot {doing}", path = path.display())]
    Io { path: PathBuf, doing: &'static str, source: io::Error },
}

#[derive(Debug)]
pub struct Bound {
    listener: UnixListener,
    file: Option<OwnFile>,
}

#[derive(Debug)]
struct OwnFile {
    path: PathBuf,
    inode: (u64, u64),
}

impl Drop for OwnFile {
    fn drop(&mut self) {
        // A successor may have put its own socket there.
        if fs::symlink_metadata(&self.path).is_ok_and(|meta| (meta.dev(), meta.ino()) == self.inode) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Bound {
    /// Listens at `path` with file mode `mode`; must be called within a tokio runtime.
    pub async fn bind(path: &Path, mode: u32) -> Result<Self, ListenError> {
        let io = |doing| move |source| ListenError::Io { path: path.to_owned(), doing, source };
        match fs::symlink_metadata(path) {
            Ok(meta) if !meta.file_type().is_socket() => {
                return Err(ListenError::NotASocket(path.to_owned()));
            }
            Ok(_) => match UnixStream::connect(path).await {
                Ok(_) => return Err(ListenError::InUse(path.to_owned())),
                // Left over from a process that was killed, perhaps while this one connected.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionReset
                    ) =>
                {
                    tracing::info!(socket = %path.display(), "replacing a stale socket");
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(io("check whether a process is listening")(error)),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(io("stat the path")(error)),
        }
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            fs::create_dir_all(folder).map_err(io("create the directory of the socket"))?;
        }
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(format!(".{}", std::process::id()));
        let temporary = PathBuf::from(temporary);
        let _ = fs::remove_file(&temporary);
        let listener = UnixListener::bind(&temporary).map_err(io("listen"))?;
        let placed = fs::set_permissions(&temporary, fs::Permissions::from_mode(mode))
            .map_err(io("set the mode of the socket"))
            .and_then(|()| fs::rename(&temporary, path).map_err(io("rename the socket into place")));
        if let Err(error) = placed {
            let _ = fs::remove_file(&temporary);
            return Err(error);
        }
        let meta = fs::symlink_metadata(path).map_err(io("stat the new socket"))?;
        let file = OwnFile { path: path.to_owned(), inode: (meta.dev(), meta.ino()) };
        Ok(Self { listener, file: Some(file) })
    }

    /// As [`Bound::bind`], but waits for up to `patience` while another process listens there: a killed process
    /// does so until the kernel has cleaned it up.
    pub async fn bind_within(path: &Path, mode: u32, patience: Duration) -> Result<Self, ListenError> {
        let since = Instant::now();
        let mut is_logged = false;
        loop {
            match Self::bind(path, mode).await {
                Err(ListenError::InUse(_)) if since.elapsed() < patience => {
                    if !std::mem::replace(&mut is_logged, true) {
                        let socket = path.display();
                        tracing::info!(%socket, ?patience, "waiting for another process to stop listening");
                    }
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
                ended => return ended,
            }
        }
    }

    /// A listener that the previous agent bound at `path`: this process owns the file now.
    pub fn adopted(listener: std::os::unix::net::UnixListener, path: &Path) -> io::Result<Self> {
        let bound = Self::inherited(listener)?;
        let file = fs::symlink_metadata(path)
            .ok()
            .map(|meta| OwnFile { path: path.to_owned(), inode: (meta.dev(), meta.ino()) });
        Ok(Self { file, ..bound })
    }

    /// A listener of another process (socket activation): its file is not removed.
    pub fn inherited(listener: std::os::unix::net::UnixListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self { listener: UnixListener::from_std(listener)?, file: None })
    }

    /// The listener, and a guard that removes its file when dropped.
    #[must_use]
    pub fn into_parts(self) -> (UnixListener, SocketFile) {
        (self.listener, SocketFile(self.file))
    }
}

/// Removes a listener's file when dropped, if the file is still its own.
#[derive(Debug)]
pub struct SocketFile(Option<OwnFile>);

impl SocketFile {
    /// Keeps the file: another process owns it now.
    pub fn disown(self) {
        std::mem::forget(self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().expect("a folder")
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let folder = folder();
        let path = folder.path().join("a/b/cri.sock");
        let first = Bound::bind(&path, 0o600).await.expect("binds");
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
        assert!(matches!(Bound::bind(&path, 0o600).await, Err(ListenError::InUse(_))));
        UnixStream::connect(&path).await.expect("the first still listens");
        // A killed process leaves its file behind.
        let (listener, file) = first.into_parts();
        std::mem::forget(file);
        drop(listener);
        assert!(path.exists());
        let second = Bound::bind(&path, 0o660).await.expect("replaces it");
        UnixStream::connect(&path).await.expect("the second listens");
        drop(second);
        assert!(!path.exists(), "removed on drop");
    }

    #[tokio::test]
    async fn other_files_at_the_path_are_kept() {
        let folder = folder();
        let path = folder.path().join("cri.sock");
        fs::write(&path, "precious").expect("writes");
        assert!(matches!(Bound::bind(&path, 0o600).await, Err(ListenError::NotASocket(_))));
        assert_eq!(fs::read_to_string(&path).expect("reads"), "precious");
        let below = path.join("cri.sock");
        assert!(matches!(Bound::bind(&below, 0o600).await, Err(ListenError::Io { .. })));
    }

    /// I5: a killed process listens until the kernel has cleaned it up.
    #[tokio::test(start_paused = true)]
    async fn a_socket_that_is_freed_in_time_is_awaited() {
        let folder = folder();
        let path = folder.path().join("cri.sock");
        let first = Bound::bind(&path, 0o600).await.expect("binds");
        let waits = Bound::bind_within(&path, 0o600, Duration::from_secs(5));
        let (second, ()) = tokio::join!(waits, async {
            tokio::time::sleep(Duration::from_secs(2)).await;
            drop(first);
        });
        let _second = second.expect("binds once the path is free");
        let refused = Bound::bind_within(&path, 0o600, Duration::from_secs(5)).await;
        assert!(matches!(refused, Err(ListenError::InUse(_))));
    }

    #[tokio::test]
    async fn an_adopted_socket_is_removed_by_its_new_owner_only() {
        let folder = folder();
        let path = folder.path().join("cri.sock");
        let (listener, file) = Bound::bind(&path, 0o600).await.expect("binds").into_parts();
        let listener = listener.into_std().expect("a listener");
        file.disown();
        let adopted = Bound::adopted(listener, &path).expect("adopts");
        UnixStream::connect(&path).await.expect("it still listens");
        drop(adopted);
        assert!(!path.exists(), "removed on drop");
    }

    #[tokio::test]
    async fn a_successors_socket_survives() {
        let folder = folder();
        let path = folder.path().join("cri.sock");
        let first = Bound::bind(&path, 0o600).await.expect("binds");
        fs::remove_file(&path).expect("removes");
        let _second = Bound::bind(&path, 0o600).await.expect("binds");
        drop(first);
        UnixStream::connect(&path).await.expect("the second is still reached");
    }
}
