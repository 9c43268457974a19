//! The client certificate on disk.
//!
//! Owns: two files in `kube.certificate_dir`, which only root can read: the certificate with its key, and the key of a
//! request that is not answered yet. In: PEM. Out: PEM. A file is replaced by renaming, so that a reader finds the old
//! one or the new one, even after a crash.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use keelson_config::Settings;

/// Certificate and key, as the kubelet's `kubelet-client-current.pem`.
const CURRENT: &str = "client-current.pem";
/// The key of a request: after a restart the agent waits for the same request.
const PENDING: &str = "client-pending.key";

pub(in crate::agent) fn certificate_file(settings: &Settings) -> PathBuf {
    settings.kube.certificate_dir.join(CURRENT)
}

#[derive(Debug, Clone)]
pub(in crate::agent) struct CertificateFiles(PathBuf);

impl CertificateFiles {
    pub(in crate::agent) fn new(folder: &Path) -> Self {
        Self(folder.to_owned())
    }

    pub(super) fn current(&self) -> PathBuf {
        self.0.join(CURRENT)
    }

    /// Certificate and key; `None` if there is no file.
    pub(super) fn read_current(&self) -> io::Result<Option<String>> {
        read(&self.current())
    }

    /// The key of a request that was not answered; `None` if there is none, or it cannot be read.
    pub(super) fn read_pending(&self) -> Option<String> {
        read(&self.0.join(PENDING)).ok().flatten()
    }

    pub(super) fn write_pending(&self, pem: &str) -> io::Result<()> {
        self.replace(PENDING, pem)
    }

    /// Removes the key of an answered request.
    pub(super) fn remove_pending(&self) {
        // A remaining file is replaced by the next one.
        let _ = fs::remove_file(self.0.join(PENDING));
    }

    /// Replaces certificate and key. On an error the old file is unchanged.
    pub(super) fn write_current(&self, pem: &str) -> io::Result<()> {
        self.replace(CURRENT, pem)
    }

    fn replace(&self, name: &str, text: &str) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.0)?;
        let draft = self.0.join(format!("{name}.new"));
        // It may be left over from a crash; a new file certainly has the mode.
        match fs::remove_file(&draft) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&draft, self.0.join(name))?;
        File::open(&self.0)?.sync_all()
    }
}

fn read(path: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// E4: files that the agent writes are readable by their owner only, and complete.
    #[test]
    fn e4_own_secrets_are_written_0600_and_replaced_atomically() {
        let scratch = tempfile::tempdir().expect("a folder");
        let folder = scratch.path().join("state/pki");
        let files = CertificateFiles::new(&folder);
        assert_eq!(files.read_current().expect("no file"), None);
        assert_eq!(files.read_pending(), None);
        files.write_pending("key").expect("written");
        // A draft of an earlier process, readable by everybody.
        fs::write(folder.join("client-current.pem.new"), "half").expect("written");
        let everybody = fs::Permissions::from_mode(0o644);
        fs::set_permissions(folder.join("client-current.pem.new"), everybody).expect("mode");
        files.write_current("one").expect("written");
        files.write_current("two").expect("written");
        assert_eq!(files.read_current().expect("a file"), Some("two".into()));
        assert_eq!(files.read_pending(), Some("key".into()));
        let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o7777;
        assert_eq!((mode(&files.current()), mode(&folder)), (0o600, 0o700));
        assert_eq!(mode(&folder.join(PENDING)), 0o600);
        files.remove_pending();
        let left: Vec<_> =
            fs::read_dir(&folder).expect("listed").map(|e| e.expect("entry").file_name()).collect();
        assert_eq!(left, [CURRENT]);
    }
}
