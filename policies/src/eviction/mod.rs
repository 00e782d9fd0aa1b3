//! Which block leaves a tier when room is needed.
//!
//! A tier is *prefix-closed*: a block is resident only where its parent is. So the blocks of a tier form a
//! forest, and the only legal victims are its leaves. A policy ranks; the tier's owner keeps the structure
//! and answers questions about it through [`Forest`].

use std::fmt;

/// One block in one tier. Dense (the tier's slot number), so that a policy may keep its state in a `Vec`.
/// An id is reused after [`Eviction::remove`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// One request's use of one tier, reported once per request and tier.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    /// Milliseconds since an arbitrary origin, never decreasing.
    pub now_ms: u64,
    /// The deepest block of the request's path that the tier holds. Its ancestors were used with it.
    pub deepest: BlockId,
    /// Blocks of the path that the tier holds, `deepest` included.
    pub depth: u32,
    /// How many of these entered the tier with this access (they are the last ones of the path).
    pub inserted: u32,
}

/// What may be done with a block right now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It has resident children: never a victim.
    Interior,
    /// A leaf that is leased, in flight or not yet flushed: not now.
    Busy,
    /// A leaf that may go.
    Evictable,
}

/// The tier's structure, as its owner knows it.
pub trait Forest {
    /// What may be done with `block`.
    fn standing(&self, block: BlockId) -> Standing;
    /// The block before `block` in its chain; `None` at a root.
    fn parent(&self, block: BlockId) -> Option<BlockId>;
}

/// An eviction policy of one tier. Victims are leaves, always.
///
/// Calls come in this order for a block: it is part of a path given to [`touch`](Self::touch), any number of
/// times; it may be named by [`victim`](Self::victim) and passed over as busy, then handed back by
/// [`release`](Self::release); [`remove`](Self::remove) ends its life.
pub trait Eviction: Send + fmt::Debug {
    /// A request used the path that ends at `access.deepest`, whose last `access.inserted` blocks are new.
    fn touch(&mut self, access: &Access, forest: &dyn Forest);

    /// `block` left the tier (it was a leaf). `exposed` is its parent where that is a leaf from now on.
    fn remove(&mut self, block: BlockId, exposed: Option<BlockId>);

    /// The leaf to evict next, or `None` when every leaf is busy. The block stays until `remove`.
    fn victim(&mut self, forest: &dyn Forest) -> Option<BlockId>;

    /// `block` is a leaf and no longer busy; `victim` may have passed it over while it was.
    fn release(&mut self, block: BlockId);
}
