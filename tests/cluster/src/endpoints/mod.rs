//! Service endpoints: what is written at an API server, what must come of it, and consumers that look.
//!
//! Owns: [`Writer`], who writes Services and EndpointSlices; [`bulk`], who writes very many; [`Churn`], who writes at
//! random; [`Truth`], what the API server's own objects mean on a node; [`Follower`] and [`Followers`], consumers that hold
//! every state against what must be true of all of them. In: a [`Cluster`](crate::kube::Cluster), a target. Out:
//! agreement, or what differs.
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
pub use whole::{Invariant, Pairs, Whole};
