//! What a manager reports of itself, its blocks and its requests.
//!
//! | file | holds |
//! |---|---|
//! | `state`, `recent` | its state, and what recent requests found |
//! | `events` | what comes to the tiers and leaves them |
//! | `demand` | what more memory would bring: hit rate against capacity |
//! | `shadow` | hits that the engine computes again, and what that says about the tiers |

pub(crate) mod demand;
pub(crate) mod events;
pub(crate) mod recent;
pub(crate) mod shadow;
pub(crate) mod state;
