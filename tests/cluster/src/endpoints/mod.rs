//! Service endpoints: objects written to an API server, the state they must result in, and consumers that check it.
//!
//! Owns: [`Writer`], which writes Services and EndpointSlices; [`bulk`], which writes very many; [`RandomWriter`],
//! which writes at random; [`ExpectedState`], the expected state of a node, computed from the API server's objects;
//! [`Follower`] and [`Followers`], consumers that check every state against invariants. In: a
//! [`Cluster`](crate::kube::Cluster), a target. Out: agreement, or the differences.
//!
//! ```ignore
//! bulk::make(&cluster, 10_000, 10).await?;
//! let followers = Followers::start(&agent.endpoints_target(), |_| Ok(()))?;
//! followers.settled(&ExpectedState::of(&cluster, "node").await?).await?;
//! followers.sound()?;
//! ```

pub mod bulk;
mod expected_state;
mod follower;
mod full_state;
mod objects;
mod random_writer;

pub use expected_state::{ExpectedState, Objects};
pub use follower::{Follower, Followers, Seen};
pub use full_state::{FullState, Invariant, Pairs};
pub use objects::{Kind, Writer, endpoint, port, service, slice};
pub use random_writer::{Paused, RandomWriter};
