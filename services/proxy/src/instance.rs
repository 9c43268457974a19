//! Which proxies run in a network namespace.
//!
//! Owns: the claims of a proxy: on its backend, whose rules have fixed names, and on its Services. In: names. Out: a
//! [`Claim`] that lasts as long as the process, or who has it.
//!
//! A claim is a listening socket with an abstract name. Such names belong to the network namespace, as the rules do, and
//! end with the process. Any user can bind one: a holder that is no system user cannot keep a proxy from running.

use std::{
    fmt, io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixListener as StdListener, UnixStream as StdStream},
    },
    time::Duration,
};

use nix::{
    sys::socket::{getsockopt, sockopt::PeerCredentials},
    unistd::geteuid,
};
use tokio::{net::UnixListener, task::JoinHandle, time::Instant};

/// Users of services: those of the distribution, and those that systemd makes (`DynamicUser=`).
const SYSTEM_USERS: [std::ops::RangeInclusive<u32>; 2] = [0..=999, 61_184..=65_519];

/// How long a process that ends may keep a claim.
const PATIENCE: Duration = Duration::from_secs(10);
const RETRY_PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    /// The name of a backend.
    Backend(&'static str),
    /// Chains and IP sets `KEELSON-*`, which backends share. See [`crate::backend::BackendInfo::has_chains`].
    Chains,
    /// The value of the label `service.kubernetes.io/service-proxy-name`; empty: Services without it.
    Services(String),
}

impl Subject {
    fn address(&self) -> io::Result<SocketAddr> {
        let name = match self {
            Self::Backend(name) => format!("keelson-proxy/backend/{name}"),
            Self::Chains => "keelson-proxy/chains".to_owned(),
            Self::Services(name) => format!("keelson-proxy/services/{name}"),
        };
        SocketAddr::from_abstract_name(name)
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Backend(name) => write!(f, "the backend {name}"),
            Self::Chains => f.write_str("the chains KEELSON-* of iptables"),
            Self::Services(name) if name.is_empty() => {
                f.write_str("the Services without a service-proxy-name")
            }
            Self::Services(name) => write!(f, "the Services with service-proxy-name {name}"),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    #[error(
        "another keelson proxy ({holder}) in this network namespace serves with {subject}; stop it, or set another \
         proxy.backend"
    )]
    Backend { subject: Subject, holder: Holder },
    #[error(
        "another keelson proxy ({holder}) in this network namespace serves {subject}; stop it, or set another \
         proxy.service_proxy_name"
    )]
    Services { subject: Subject, holder: Holder },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder {
    /// 0: a process of another PID namespace.
    pub pid: i32,
    pub uid: u32,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            0 => f.write_str("in another container"),
            pid => write!(f, "pid {pid}"),
        }
    }
}

impl Holder {
    fn counts(self) -> bool {
        self.uid == geteuid().as_raw() || SYSTEM_USERS.iter().any(|users| users.contains(&self.uid))
    }
}

/// Ends when it is dropped.
#[derive(Debug)]
pub struct Claim {
    /// Closes connections of those who look; `None`: the claim could not be made and is not needed.
    task: Option<JoinHandle<()>>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// Claims `subject`, and waits some seconds for a process that has it. Must be called within a tokio runtime.
///
/// # Errors
/// Another proxy has it.
pub async fn claim(subject: &Subject) -> Result<Claim, ClaimError> {
    claim_within(subject, PATIENCE).await
}

async fn claim_within(subject: &Subject, patience: Duration) -> Result<Claim, ClaimError> {
    let since = Instant::now();
    let mut is_logged = false;
    loop {
        let error = match listen(subject) {
            Ok(task) => return Ok(Claim { task: Some(task) }),
            Err(error) => error,
        };
        let holder = if error.kind() == io::ErrorKind::AddrInUse { holder(subject) } else { None };
        match holder {
            Some(holder) if holder.counts() && since.elapsed() < patience => {
                if !std::mem::replace(&mut is_logged, true) {
                    tracing::info!(%subject, %holder, ?patience, "waiting for another proxy to end");
                }
            }
            Some(holder) if holder.counts() => {
                let subject = subject.clone();
                return Err(match subject {
                    Subject::Backend(_) | Subject::Chains => ClaimError::Backend { subject, holder },
                    Subject::Services(_) => ClaimError::Services { subject, holder },
                });
            }
            // It ended between the two calls.
            None if error.kind() == io::ErrorKind::AddrInUse && since.elapsed() < patience => {}
            _ => {
                tracing::warn!(
                    %subject, %error, holder = holder.map(|holder| holder.to_string()),
                    "cannot prevent a second proxy from using the same rules"
                );
                return Ok(Claim { task: None });
            }
        }
        tokio::time::sleep(RETRY_PAUSE).await;
    }
}

fn listen(subject: &Subject) -> io::Result<JoinHandle<()>> {
    let listener = StdListener::bind_addr(&subject.address()?)?;
    listener.set_nonblocking(true)?;
    let listener = UnixListener::from_std(listener)?;
    Ok(tokio::spawn(async move {
        loop {
            if listener.accept().await.is_err() {
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        }
    }))
}

/// The process that has claimed `subject`, if any.
#[must_use]
pub fn holder(subject: &Subject) -> Option<Holder> {
    let stream = StdStream::connect_addr(&subject.address().ok()?).ok()?;
    let peer = getsockopt(&stream, PeerCredentials).ok()?;
    Some(Holder { pid: peer.pid(), uid: peer.uid() })
}

/// Whether a proxy with this backend runs in this network namespace.
#[must_use]
pub fn runs(backend: &'static str) -> bool {
    holder(&Subject::Backend(backend)).is_some_and(Holder::counts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::in_namespace;

    fn on_runtime<T>(test: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test)
    }

    #[test]
    fn a_second_claim_is_refused_until_the_first_ends() {
        in_namespace(|| {
            on_runtime(async {
                let subject = Subject::Backend("nft");
                assert!(!runs("nft"));
                let first = claim(&subject).await.unwrap();
                assert!(runs("nft") && !runs("iptables"));
                let error = claim_within(&subject, Duration::ZERO).await.unwrap_err().to_string();
                let own = format!("another keelson proxy (pid {})", std::process::id());
                assert!(error.starts_with(&own) && error.contains("set another proxy.backend"), "{error}");
                // Others are free.
                let _other = claim_within(&Subject::Backend("iptables"), Duration::ZERO).await.unwrap();
                let _chains = claim_within(&Subject::Chains, Duration::ZERO).await.unwrap();
                let error = claim_within(&Subject::Chains, Duration::ZERO).await.unwrap_err().to_string();
                assert!(error.contains("serves with the chains KEELSON-* of iptables"), "{error}");
                let edge = Subject::Services("edge".into());
                let _edge = claim_within(&edge, Duration::ZERO).await.unwrap();
                let error = claim_within(&edge, Duration::ZERO).await.unwrap_err().to_string();
                assert!(error.contains("service-proxy-name edge"), "{error}");
                let _unlabelled =
                    claim_within(&Subject::Services(String::new()), Duration::ZERO).await.unwrap();
                // One that waits gets it.
                let waiting = tokio::spawn(async move { claim(&Subject::Backend("nft")).await.is_ok() });
                tokio::task::yield_now().await;
                drop(first);
                assert!(waiting.await.unwrap());
            });
        });
    }

    /// Rules are of the namespace, and so are claims.
    #[test]
    fn each_network_namespace_has_its_own() {
        in_namespace(|| {
            on_runtime(async {
                let _claim = claim_within(&Subject::Backend("nft"), Duration::ZERO).await.unwrap();
                in_namespace(|| on_runtime(async { assert!(!runs("nft")) }));
                assert!(runs("nft"));
            });
        });
    }

    #[test]
    fn ordinary_users_cannot_keep_a_proxy_from_running() {
        let counts = |uid| Holder { pid: 1, uid }.counts();
        assert!(counts(0) && counts(998) && counts(61_200) && counts(geteuid().as_raw()));
        assert!(!counts(1000) && !counts(65_534));
    }
}
