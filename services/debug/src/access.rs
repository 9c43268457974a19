//! Authorization of changes through the debug socket.
//!
//! Owns: the decision for each call that changes something. In: the credentials of the connected process
//! (`SO_PEERCRED`, see unix(7)), and the view's answer for its user. Out: nothing, or PERMISSION_DENIED.
//!
//! The socket's mode and group give read access; changing the limit or the node's conditions needs more.

use std::sync::Arc;

use keelson_serve::grpc::Peer;
use tonic::{Request, Status};

use crate::AgentView;

/// Checks that the process behind this call may change something. PERMISSION_DENIED for a user with read access only,
/// and for a connection without a known user.
pub(crate) fn may_change<T>(view: &impl AgentView, request: &Request<T>) -> Result<(), Status> {
    let Some(uid) = request.extensions().get::<Arc<Peer>>().and_then(|peer| peer.uid) else {
        return Err(Status::permission_denied("the user of this connection is unknown"));
    };
    if view.may_change(uid) {
        return Ok(());
    }
    Err(Status::permission_denied(format!(
        "user {uid} has read access only; run this as root or add the user to debug.control_users"
    )))
}
