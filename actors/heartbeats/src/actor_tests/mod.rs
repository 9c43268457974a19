//! The actors with scripted neighbours, on paused time.

mod lease;
mod status;
