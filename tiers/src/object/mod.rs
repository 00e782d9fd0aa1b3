//! The object tier: segments of blocks in an object store.
