//! The CRI on both sides of the agent.
//!
//! Owns: [`front`], the unix socket for kubelet, crictl and other CRI clients, and [`runtime`], the agent's own
//! connection to the container runtime. In: CRI calls. Out: every call but `ImageService/PullImage` goes to the runtime
//! as HTTP/2 bytes; a `PullImage` becomes a `RequestPull` for the PullCoordinator. [`runtime::ContainerRuntime`]
//! implements the trait that the actors declare.

pub mod front;
pub mod runtime;
