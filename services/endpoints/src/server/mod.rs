//! The Endpoints API.
