//! `kvbm-logical` as a subject.

use dynamo_tokens::PositionalLineageHash;
use kvbm_cli::measuring::chains::SHORT;
use kvbm_cli::measuring::subject::Subject;
use kvbm_logical::manager::BlockManager;
use kvbm_logical::registry::BlockRegistry;

/// Tokens of a block.
const BLOCK_TOKENS: usize = 16;

#[derive(Clone)]
struct Host;

/// Its block manager with the LRU backend, all calls batched.
pub(crate) struct Logical(BlockManager<Host>);

impl Logical {
    pub(crate) fn of(slots: usize) -> Self {
        let builder = BlockManager::builder().block_count(slots).block_size(BLOCK_TOKENS);
        let manager = builder.registry(BlockRegistry::new()).with_lru_backend().build();
        Self(manager.expect("the settings are valid"))
    }
}

impl Subject for Logical {
    type Name = PositionalLineageHash;

    fn names(chain: &[kvbm::BlockHash]) -> Vec<PositionalLineageHash> {
        let mut parent = None;
        let name = |(position, hash): (u64, &kvbm::BlockHash)| {
            let own = hash.get() as u64;
            PositionalLineageHash::new(own, parent.replace(own), position)
        };
        (0..).zip(chain).map(name).collect()
    }

    fn publish(&self, chain: &[PositionalLineageHash], from: usize) {
        for names in chain[from..].chunks(SHORT) {
            let blocks = self.0.allocate_blocks(names.len()).expect("old blocks make room");
            let stage = |(block, &name): (kvbm_logical::blocks::MutableBlock<Host>, _)| {
                block
                    .stage(name, BLOCK_TOKENS)
                    .unwrap_or_else(|_| unreachable!("the block size is its own"))
            };
            drop(self.0.register_blocks(blocks.into_iter().zip(names).map(stage).collect()));
        }
    }

    fn match_prompt(&self, chain: &[PositionalLineageHash]) -> usize {
        self.0.match_blocks(chain).len()
    }
}
