//! Follows the service endpoints that a Keelson agent serves.
