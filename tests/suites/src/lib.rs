//! Suites of Keelson against the real components: `tests/`, one folder for each suite.
