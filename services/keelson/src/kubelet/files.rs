//! Files of the kubelet, replaced atomically, each with a copy of what it was.
//!
//! Owns: the names of copies. In: [`Edit`]s. Out: files. A reader finds the old file or the new one, even after a crash;
//! the copy is there before the file changes. Copies are beside the file, not in the agent's state folder: they outlive a
//! removal of the agent with its state, and go with the kubelet (`kubeadm reset`).

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, chown},
    path::{Path, PathBuf},
};

use super::edit::{Direction, Edit};

/// The copy of `keelson attach`, from which `keelson bypass` restores values.
pub(crate) fn saved(path: &Path) -> PathBuf {
    with_end(path, ".before-keelson")
}

/// The copy of `keelson bypass`.
fn attached(path: &Path) -> PathBuf {
    with_end(path, ".with-keelson")
}

fn with_end(path: &Path, end: &str) -> PathBuf {
    let mut name = OsString::from(path.as_os_str());
    name.push(end);
    name.into()
}

/// A file that cannot be written, and why.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {path}: {source}; no later file was changed")]
pub(crate) struct WriteError {
    path: String,
    #[source]
    source: io::Error,
}

/// Performs the edits in order.
pub(crate) fn apply(direction: Direction, edits: &[Edit]) -> Result<(), WriteError> {
    for edit in edits {
        let written = one(direction, edit);
        written.map_err(|source| WriteError { path: edit.path.display().to_string(), source })?;
    }
    Ok(())
}

fn one(direction: Direction, edit: &Edit) -> io::Result<()> {
    // A link stays one.
    let path = fs::canonicalize(&edit.path).unwrap_or_else(|_| edit.path.clone());
    if let Some(before) = &edit.before {
        let copy = match direction {
            Direction::Attach => edit.saves.then(|| saved(&edit.path)),
            Direction::Bypass => Some(attached(&edit.path)),
        };
        if let Some(copy) = copy {
            replace(&copy, before, Some(&path))?;
        }
    }
    match &edit.after {
        Some(after) => {
            if edit.before.is_none()
                && let Some(folder) = path.parent()
            {
                fs::create_dir_all(folder)?;
            }
            replace(&path, after, edit.before.is_some().then_some(&path))?;
        }
        None => fs::remove_file(&path)?,
    }
    Ok(())
}

/// Also if it does not exist.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// `like`: the file whose mode and owner it gets; the default is what kubeadm gives: root and 0644.
fn replace(path: &Path, text: &str, like: Option<&Path>) -> io::Result<()> {
    let like = like.map(fs::metadata).transpose()?;
    let draft = with_end(path, ".keelson-draft");
    remove(&draft)?;
    let mode = like.as_ref().map_or(0o644, |like| like.mode() & 0o7777);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&draft)?;
    if let Some(like) = like {
        fs::set_permissions(&draft, like.permissions())?;
        let own = file.metadata()?;
        if (own.uid(), own.gid()) != (like.uid(), like.gid()) {
            chown(&draft, Some(like.uid()), Some(like.gid()))?;
        }
    }
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&draft, path)?;
    match path.parent() {
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn edit(path: &Path, before: Option<&str>, after: Option<&str>) -> Edit {
        let text = |text: Option<&str>| text.map(ToOwned::to_owned);
        Edit { path: path.to_owned(), before: text(before), after: text(after), saves: true }
    }

    #[test]
    fn a_file_is_replaced_with_its_mode_and_a_copy_of_what_it_was() {
        let folder = tempfile::tempdir().expect("a folder");
        let (file, link) = (folder.path().join("config.yaml"), folder.path().join("link.yaml"));
        fs::write(&file, "old").expect("writes");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).expect("mode");
        std::os::unix::fs::symlink(&file, &link).expect("links");
        let mode = |path: &Path| fs::metadata(path).expect("there").mode() & 0o7777;
        let read = |path: &Path| fs::read_to_string(path).ok();
        apply(Direction::Attach, &[edit(&link, Some("old"), Some("new"))]).expect("writes");
        assert_eq!((read(&file).as_deref(), mode(&file)), (Some("new"), 0o600));
        assert!(fs::symlink_metadata(&link).expect("there").is_symlink());
        assert_eq!((read(&saved(&link)).as_deref(), mode(&saved(&link))), (Some("old"), 0o600));
        apply(Direction::Bypass, &[edit(&link, Some("new"), Some("old"))]).expect("writes");
        assert_eq!(read(&file).as_deref(), Some("old"));
        assert_eq!(read(&attached(&link)).as_deref(), Some("new"));
        let drop_in = folder.path().join("conf.d/20-keelson.conf");
        apply(Direction::Attach, &[edit(&drop_in, None, Some("x"))]).expect("makes the folder");
        assert_eq!((read(&drop_in).as_deref(), mode(&drop_in)), (Some("x"), 0o644));
        apply(Direction::Bypass, &[edit(&drop_in, Some("x"), None)]).expect("removes");
        assert_eq!(read(&drop_in), None);
        let left = fs::read_dir(folder.path()).expect("lists").flatten().map(|entry| entry.file_name());
        assert!(left.into_iter().all(|name| !name.to_string_lossy().ends_with(".keelson-draft")));
    }

    #[test]
    fn errors_name_the_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("config.yaml");
        fs::create_dir(&file).expect("makes");
        let error =
            apply(Direction::Attach, &[edit(&file, None, Some("x"))]).expect_err("a folder").to_string();
        assert!(error.contains("config.yaml: ") && error.contains("no later file was changed"), "{error}");
    }
}
