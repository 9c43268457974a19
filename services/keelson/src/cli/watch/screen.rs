//! Where lists of pulls are shown.

use std::io;

use keelson_proto::debug as pb;

pub(super) trait Screen {
    fn show(&mut self, list: &pb::PullList) -> io::Result<()>;
    /// A message about the connection, such as a lost agent.
    fn note(&mut self, text: &str) -> io::Result<()>;
    fn end(&mut self);
}
