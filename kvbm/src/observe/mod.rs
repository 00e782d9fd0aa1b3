//! What a manager reports of itself, its blocks and its requests.
//!
//! | file | holds |
//! |---|---|
//! | `state` | its state |
//! | `requests` | what recent requests found, and what more memory would bring: hit rate against capacity |
//! | `events` | what comes to the tiers and leaves them |
//! | `shadow` | hits that the engine computes again, and what that says about the tiers |

pub(crate) mod events;
pub(crate) mod requests;
pub(crate) mod shadow;
pub(crate) mod state;
