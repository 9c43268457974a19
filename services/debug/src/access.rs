//! Who may change something through the debug socket.
//!
//! Owns: the decision for each call that changes something. In: the credentials of the process that connected
//! (`SO_PEERCRED`, see unix(7)), and the view's answer for its user. Out: nothing, or PERMISSION_DENIED.
//!
//! The socket's mode and group say who may look; changing the limit or the node's conditions needs more.

use tonic::{Request, Status, transport::server::UdsConnectInfo};

use crate::AgentView;

/// Whether the process behind this call may change something.
///
/// # Errors
/// PERMISSION_DENIED for a user who may only look, and for a connection that does not tell its user.
pub(crate) fn may_change<T>(view: &impl AgentView, request: &Request<T>) -> Result<(), Status> {
    let peer = request.extensions().get::<UdsConnectInfo>().and_then(|info| info.peer_cred);
    let Some(peer) = peer else {
        return Err(Status::permission_denied("the user of this connection is unknown"));
    };
    if view.may_change(peer.uid()) {
        return Ok(());
    }
    Err(Status::permission_denied(format!(
        "user {} has read access only; run this as root or add the user to debug.control_users",
        peer.uid()
    )))
}
