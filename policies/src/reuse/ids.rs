//! Names of what the model keeps.

/// One radix path among all that are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct PathId(pub(crate) u32);

/// One request's use among all of which something is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UseId(pub(super) u32);

/// A place in a radix path; depths count from the root of the tree, which has depth 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NodeId {
    pub(super) path: PathId,
    pub(super) depth: u32,
}
