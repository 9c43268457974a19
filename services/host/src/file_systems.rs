//! Sizes of file systems.
//!
//! Owns: one thread for each path that is being measured. In: paths. Out: [`FileSystem`]s, or an error. A network file
//! system whose server does not answer can block statvfs(2) indefinitely: the caller stops waiting, and the next one
//! waits for the same call instead of blocking another thread.

use std::{
    collections::HashMap,
    fmt, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use futures_util::{
    FutureExt as _,
    future::{BoxFuture, Shared},
};
use keelson_actor_system::file_system::FileSystem;
use tokio::sync::oneshot;

/// Maximum wait for a file system.
const READ_TIMEOUT: Duration = Duration::from_secs(3);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FileSystemError {
    #[error("cannot read the capacity of the file system of {path}: {reason}", path = .path.display())]
    Failed { path: PathBuf, reason: String },
    /// No answer in time.
    #[error("the file system of {path} did not answer within {READ_TIMEOUT:?}; check its server if it is a \
             network file system", path = .path.display())]
    Hangs { path: PathBuf },
}

type Answer = Result<FileSystem, FileSystemError>;
type Measure = Arc<dyn Fn(&Path) -> io::Result<FileSystem> + Send + Sync>;

/// Clones share their threads.
#[derive(Clone)]
pub(crate) struct FileSystems {
    measure: Measure,
    asking: Arc<Mutex<HashMap<PathBuf, Shared<BoxFuture<'static, Answer>>>>>,
}

impl fmt::Debug for FileSystems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileSystems").field("asking", &self.asking().keys()).finish_non_exhaustive()
    }
}

impl FileSystems {
    /// Measures with statvfs(2).
    pub(crate) fn new() -> Self {
        Self::measured_by(Arc::new(statvfs))
    }

    fn measured_by(measure: Measure) -> Self {
        Self { measure, asking: Arc::default() }
    }

    fn asking(&self) -> MutexGuard<'_, HashMap<PathBuf, Shared<BoxFuture<'static, Answer>>>> {
        self.asking.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Measures the file system that holds `path`.
    pub(crate) async fn read(&self, path: PathBuf) -> Answer {
        let answer = self.ask(&path);
        tokio::time::timeout(READ_TIMEOUT, answer).await.unwrap_or(Err(FileSystemError::Hangs { path }))
    }

    fn ask(&self, path: &Path) -> Shared<BoxFuture<'static, Answer>> {
        let mut asking = self.asking();
        if let Some(answer) = asking.get(path)
            && answer.peek().is_none()
        {
            return answer.clone();
        }
        let failed = |path: &Path, reason: String| FileSystemError::Failed { path: path.to_owned(), reason };
        let (tell, told) = oneshot::channel();
        let (of, me) = (path.to_owned(), self.clone());
        // A plain thread: the runtime waits for its own threads when the process ends.
        let thread = thread::Builder::new().name("file-system".to_owned()).spawn(move || {
            let answer = (me.measure)(&of).map_err(|error| failed(&of, error.to_string()));
            me.asking().remove(&of);
            // The caller may have stopped waiting.
            let _ = tell.send(answer);
        });
        if let Err(error) = thread {
            return std::future::ready(Err(failed(path, error.to_string()))).boxed().shared();
        }
        let at = path.to_owned();
        let answer = async move {
            told.await.unwrap_or_else(|_| Err(failed(&at, "its thread exited without an answer".to_owned())))
        };
        let answer = answer.boxed().shared();
        // The thread takes this lock before it removes its entry.
        asking.insert(path.to_owned(), answer.clone());
        answer
    }
}

fn statvfs(path: &Path) -> io::Result<FileSystem> {
    let stat = nix::sys::statvfs::statvfs(path)?;
    let bytes = |blocks: u64| blocks.saturating_mul(stat.fragment_size());
    Ok(FileSystem {
        capacity_bytes: bytes(stat.blocks()),
        available_bytes: bytes(stat.blocks_available()),
        inodes: stat.files(),
        inodes_free: stat.files_free(),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc,
    };

    use super::*;

    const SOME: FileSystem =
        FileSystem { capacity_bytes: 100, available_bytes: 50, inodes: 10, inodes_free: 5 };

    /// Answers each call with what is sent, and counts the calls.
    fn scripted() -> (FileSystems, mpsc::Sender<io::Result<FileSystem>>, Arc<AtomicUsize>) {
        let (answer, answers) = mpsc::channel();
        let (answers, calls) = (Mutex::new(answers), Arc::new(AtomicUsize::new(0)));
        let counted = calls.clone();
        let measure = move |_: &Path| {
            counted.fetch_add(1, Ordering::SeqCst);
            answers.lock().expect("unharmed").recv().expect("the test waits")
        };
        (FileSystems::measured_by(Arc::new(measure)), answer, calls)
    }

    #[tokio::test(start_paused = true)]
    async fn a_hanging_file_system_costs_one_thread_until_it_answers() {
        let (file_systems, answer, calls) = scripted();
        let path = PathBuf::from("/mnt/away");
        for _ in 0..5 {
            // The paused clock jumps to the timeout.
            let error = file_systems.read(path.clone()).await.expect_err("it hangs");
            assert_eq!(error, FileSystemError::Hangs { path: path.clone() });
            assert!(error.to_string().contains("/mnt/away"));
        }
        let call = file_systems.ask(&path);
        answer.send(Ok(SOME)).expect("one waits");
        assert_eq!(call.await, Ok(SOME));
        assert_eq!(calls.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn every_reading_is_a_new_one() {
        let (file_systems, answer, calls) = scripted();
        let path = PathBuf::from("/");
        answer.send(Ok(SOME)).expect("sends");
        assert_eq!(file_systems.ask(&path).await, Ok(SOME));
        answer.send(Err(io::Error::from_raw_os_error(5))).expect("sends");
        let error = file_systems.ask(&path).await.expect_err("an I/O error");
        assert!(error.to_string().starts_with("cannot read the capacity of the file system of /"), "{error}");
        assert_eq!(calls.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn missing_paths_are_named_in_errors() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("not/there");
        let error = FileSystems::new().read(path.clone()).await.expect_err("nothing is there");
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    }
}
