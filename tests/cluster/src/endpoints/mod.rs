//! Service endpoints: objects written to an API server, the state they must result in, and consumers that check it.
//!
//! Owns: [`Writer`], which writes Services and EndpointSlices; [`bulk`], which writes very many; [`Churn`], which
//! writes at random; [`Truth`], the expected state of a node, computed from the API server's objects; [`Follower`] and
//! [`Followers`], consumers that check every state against invariants. In: a [`Cluster`](crate::kube::Cluster), a
//! target. Out: agreement, or the differences.
//!
//! ```ignore
//! bulk::make(&cluster, 10_000, 10).await?;
//! let followers = Followers::start(&agent.endpoints_target(), |_| Ok(()))?;
//! followers.settled(&Truth::of(&cluster, "node").await?).await?;
//! followers.sound()?;
//! ```

pub mod bulk;
mod churn;
mod follower;
mod objects;
mod truth;
mod whole;

pub use churn::{Churn, Paused};
pub use follower::{Follower, Followers, Seen};
pub use objects::{Kind, Writer, endpoint, port, service, slice};
pub use truth::Truth;
pub use whole::{FullState, Invariant, Pairs};
