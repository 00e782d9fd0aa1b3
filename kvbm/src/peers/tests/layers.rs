//! A pull of blocks that are saved layer by layer.

use kvbm_tiers::layers::bytes_of_layer;

use super::following::{PATIENCE, follow, pair};
use super::*;
use crate::api::layers::LayeredPut;
use crate::peers::nixl::tests::{self as nixl, NixlDouble, Reads, came_by, lost};
use crate::peers::reader::Pulled;

pub(super) const LAYERS: u16 = 4;
const LAYER: Duration = Duration::from_millis(50);

impl Worker {
    pub(super) fn begin_layers(&self, chain: &[BlockHash]) -> LayeredPut {
        let layers = LAYERS.try_into().unwrap();
        self.blocks.put_in_layers(RequestInfo::default(), chain, layers).unwrap()
    }

    pub(super) fn compute_layer(&self, put: &mut LayeredPut, chain: &[BlockHash], layer: u16) {
        let bytes = bytes_of_layer(BLOCK, layer, LAYERS.try_into().unwrap());
        put.write(|at, part| {
            part.copy_from_slice(&self.content(chain[at])[bytes.clone()]);
            Ok::<_, Error>(())
        })
        .unwrap();
    }

    /// Computes some layers of a chain, and gives others time after each.
    pub(super) async fn compute_layers(&self, chain: &[BlockHash], layers: u16) -> LayeredPut {
        let mut put = self.begin_layers(chain);
        for layer in 0..layers {
            sleep(LAYER).await;
            self.compute_layer(&mut put, chain, layer);
        }
        sleep(LAYER).await;
        put
    }

    fn filling(&self) -> u32 {
        self.manager().admin().counts(Tier::Host).filling
    }
}

/// Over the connection, from a neighbour's memory, and by NIXL.
async fn pairs() -> Vec<Pair> {
    let mut pairs = unconnected().await;
    for pair in &mut pairs {
        assert!(pair.connect(Fault::None).await);
    }
    pairs
}

async fn unconnected() -> Vec<Pair> {
    let mut pairs = vec![Pair::new().await];
    pairs.push(Pair { are_neighbours: true, ..Pair::new().await });
    pairs.push(nixl::pair().await.0);
    pairs
}

async fn with_nixl() -> (Pair, Arc<NixlDouble>) {
    let (mut pair, double) = nixl::pair().await;
    assert!(pair.connect(Fault::None).await);
    (pair, double)
}

#[test]
fn layers_come_as_they_are_written_and_blocks_when_whole() {
    simulated(async {
        for (mut pair, way) in pairs().await.into_iter().zip(["tcp", "shared_memory", "nixl"]) {
            let wanted = chain(0, 12);
            let meanwhile = async {
                let put = pair.there.compute_layers(&wanted, LAYERS).await;
                assert_eq!(pair.here.filling(), 12, "the reader has taken slots for them");
                assert_eq!(pair.here.check(&wanted), 0, "the engine may still give them up");
                assert_eq!(put.finish().unwrap(), 12);
                sleep(Duration::from_millis(1)).await;
                assert_eq!(pair.here.check(&wanted), 12);
            };
            let Pulled { blocks, copied, fault, .. } = follow(&pair, &wanted, meanwhile).await;
            assert_eq!((blocks, copied, fault), (12, 12, None));
            assert_eq!(came_by(&pair, way), 12);
            let asked = pair.there.counted("kvbm_peer_leases_total", &[("direction", "sent")]);
            assert!(asked <= 2, "{asked} leases");
            pair.heals().await;
        }
    });
}

#[test]
fn layers_follow_blocks_that_are_there() {
    simulated(async {
        for mut pair in pairs().await {
            let wanted = chain(0, 12);
            pair.there.compute(&wanted[..5]);
            pair.here.compute(&wanted[..3]);
            let meanwhile = async {
                let put = pair.there.compute_layers(&wanted[..9], LAYERS).await;
                assert_eq!((put.blocks(), pair.here.check(&wanted)), (5..9, 5));
                put.finish().unwrap();
                let put = pair.there.compute_layers(&wanted, LAYERS).await;
                assert_eq!((put.blocks(), pair.here.check(&wanted)), (9..12, 9));
                put.finish().unwrap();
            };
            let Pulled { blocks, copied, fault, .. } = follow(&pair, &wanted, meanwhile).await;
            assert_eq!((blocks, copied, fault), (12, 9, None));
            pair.heals().await;
        }
    });
}

#[test]
fn a_reader_that_comes_late_gets_all_layers() {
    simulated(async {
        for mut pair in pairs().await {
            let wanted = chain(0, 12);
            let put = pair.there.compute_layers(&wanted, LAYERS - 1).await;
            let meanwhile = async {
                let mut put = put;
                sleep(LAYER).await;
                pair.there.compute_layer(&mut put, &wanted, LAYERS - 1);
                put.finish().unwrap();
            };
            let Pulled { blocks, fault, .. } = follow(&pair, &wanted, meanwhile).await;
            assert_eq!((blocks, fault), (12, None));
            pair.heals().await;
        }
    });
}

#[test]
fn a_save_given_up_amid_layers_leaves_nothing() {
    simulated(async {
        for layers in 0..=LAYERS {
            for mut pair in pairs().await {
                let wanted = chain(0, 12);
                pair.there.compute(&wanted[..2]);
                let meanwhile = async { drop(pair.there.compute_layers(&wanted, layers).await) };
                let Pulled { blocks, fault, .. } = follow(&pair, &wanted, meanwhile).await;
                assert_eq!((blocks, pair.here.check(&wanted), pair.here.filling()), (2, 2, 0));
                assert!(fault.unwrap().contains("given up"));
                assert_eq!(pair.there.check(&wanted), 2);
                pair.heals().await;
            }
        }
    });
}

#[test]
fn a_save_that_lacks_layers_is_given_up() {
    simulated(async {
        let mut pair = pair().await;
        let wanted = chain(0, 6);
        let put = pair.there.compute_layers(&wanted, LAYERS - 1).await;
        assert!(put.finish().unwrap_err().to_string().contains("3 of 4 layers"));
        let mut put = pair.there.compute_layers(&wanted, LAYERS).await;
        let more = put.write(|_, _| Ok::<_, Error>(())).unwrap_err();
        assert!(more.to_string().contains("all layers"));
        assert_eq!((put.finish().unwrap(), pair.there.check(&wanted)), (6, 6));
        pair.heals().await;
    });
}

#[test]
fn a_holder_that_goes_amid_layers_leaves_nothing() {
    simulated(async {
        for mut pair in pairs().await {
            let wanted = chain(0, 12);
            let meanwhile = async {
                let put = pair.there.compute_layers(&wanted, 2).await;
                pair.tasks.iter().for_each(AbortHandle::abort);
                sleep(LAYER).await;
                drop(put);
            };
            let Pulled { blocks, fault, .. } = follow(&pair, &wanted, meanwhile).await;
            assert_eq!((blocks, fault.is_some(), pair.here.filling()), (0, true, 0));
            pair.heals().await;
        }
    });
}

#[test]
fn a_reset_amid_layers_leaves_nothing() {
    simulated(async {
        for [resets_there, resets_here] in [[true, false], [false, true], [true, true]] {
            for mut pair in pairs().await {
                let wanted = chain(0, 12);
                let meanwhile = async {
                    let mut put = pair.there.compute_layers(&wanted, LAYERS - 1).await;
                    for (resets, worker) in [(resets_there, &pair.there), (resets_here, &pair.here)]
                    {
                        if resets {
                            worker.reset_again(Some("new"));
                        }
                    }
                    pair.there.compute_layer(&mut put, &wanted, LAYERS - 1);
                    assert_eq!(put.finish().is_err(), resets_there);
                };
                let never = CancellationToken::new();
                let info = RequestInfo::default();
                let following = pair.reader.follow(asked(&wanted, info, PATIENCE), &never);
                let (pulled, ()) = tokio::join!(following, meanwhile);
                assert_eq!(pulled.map_or(0, |pulled| pulled.blocks), 0);
                assert_eq!((pair.here.check(&wanted), pair.here.filling()), (0, 0));
                pair.heals().await;
            }
        }
    });
}

#[test]
fn a_layer_unlike_its_checksum_leaves_nothing() {
    // From the greeting to the last layer.
    let mut wrong = 0;
    for at in (0..8 * BLOCK).step_by(61) {
        simulated(async {
            let mut pair = Pair::new().await;
            if !pair.connect(Fault::Flip(at)).await {
                return;
            }
            let wanted = chain(0, 6);
            let meanwhile = async {
                pair.there.compute_layers(&wanted, LAYERS).await.finish().unwrap();
            };
            let (never, info) = (CancellationToken::new(), RequestInfo::default());
            let following = pair.reader.follow(asked(&wanted, info, PATIENCE), &never);
            drop(tokio::join!(following, meanwhile));
            pair.here.check(&wanted);
            let ended = [("direction", "received"), ("end", "wrong")];
            wrong += pair.here.counted("kvbm_peer_leases_total", &ended);
            pair.heals().await;
        });
    }
    assert!(wrong > 20, "{wrong} wrong layers were found");
}

#[test]
fn layers_are_waited_for_as_long_as_blocks() {
    simulated(async {
        for mut pair in unconnected().await {
            assert!(pair.connect(Fault::None).await);
            let wanted = chain(0, 12);
            let meanwhile = async {
                let put = pair.there.compute_layers(&wanted, 2).await;
                sleep(3 * PATIENCE).await;
                put
            };
            let before = Instant::now();
            let (never, info) = (CancellationToken::new(), RequestInfo::default());
            let following = async {
                let pulled = pair.reader.follow(asked(&wanted, info, PATIENCE), &never).await;
                (pulled, before.elapsed())
            };
            let ((pulled, took), put) = tokio::join!(following, meanwhile);
            assert!(pulled.unwrap().fault.unwrap().contains("does not come in time"));
            assert!(took >= PATIENCE && took <= PATIENCE + 4 * LAYER, "{took:?}");
            drop(put);
            pair.heals().await;
        }
    });
}

#[test]
fn layers_of_no_more_blocks_are_leased_than_the_share() {
    simulated(async {
        for mut pair in pairs().await {
            let wanted = chain(0, 13);
            let meanwhile = async {
                let put = pair.there.compute_layers(&wanted, LAYERS).await;
                assert_eq!(pair.leased.blocks(), 12);
                put.finish().unwrap();
            };
            let Pulled { blocks, .. } = follow(&pair, &wanted, meanwhile).await;
            assert_eq!(blocks, 12);
            pair.heals().await;
        }
    });
}

#[test]
fn a_reader_that_is_cancelled_amid_layers_leaves_nothing() {
    simulated(async {
        for mut pair in pairs().await {
            let (wanted, cancelled) = (chain(0, 12), CancellationToken::new());
            let info = RequestInfo::default();
            let following = pair.reader.follow(asked(&wanted, info, PATIENCE), &cancelled);
            let meanwhile = async {
                let put = pair.there.compute_layers(&wanted, 2).await;
                cancelled.cancel();
                sleep(Duration::from_millis(1)).await;
                assert_eq!((pair.here.filling(), pair.leased.blocks()), (0, 0));
                drop(put);
            };
            let (pulled, ()) = tokio::join!(following, meanwhile);
            assert_eq!(pulled.unwrap().blocks, 0);
            pair.heals().await;
        }
    });
}

/// It waits for the first layer as long as for blocks, and then for each as long again.
#[test]
fn each_layer_has_the_whole_patience() {
    // The holder answers once before the save begins.
    let (patience, begins) = (TTL * 8 / 5, TTL * 6 / 5);
    simulated(async {
        for mut pair in unconnected().await {
            assert!(pair.connect(Fault::None).await);
            let (wanted, info, never) =
                (chain(0, 12), RequestInfo::default(), CancellationToken::new());
            let meanwhile = async {
                sleep(begins).await;
                let mut put = pair.there.begin_layers(&wanted);
                sleep(LAYER).await;
                for layer in 0..LAYERS {
                    pair.there.compute_layer(&mut put, &wanted, layer);
                    sleep(patience / 2).await;
                }
                put.finish().unwrap();
            };
            let following = pair.reader.follow(asked(&wanted, info, patience), &never);
            let Pulled { blocks, fault, .. } = tokio::join!(following, meanwhile).0.unwrap();
            assert_eq!((blocks, fault), (12, None));
            let (wanted, before) = (chain(3, 12), Instant::now());
            let meanwhile = async {
                sleep(begins).await;
                let put = pair.there.begin_layers(&wanted);
                sleep(patience).await;
                drop(put);
            };
            let following = async {
                let pulled = pair.reader.follow(asked(&wanted, info, patience), &never).await;
                (pulled, before.elapsed())
            };
            let ((pulled, took), ()) = tokio::join!(following, meanwhile);
            assert!(pulled.unwrap().fault.unwrap().contains("does not come in time"));
            assert!(took >= patience && took <= patience + LAYER, "{took:?}");
            pair.heals().await;
        }
    });
}

#[test]
fn a_second_reader_waits_while_the_first_gets_layers() {
    simulated(async {
        for mut pair in unconnected().await {
            // A connection and a lease each.
            pair.leased = Arc::new(LeasedBlocks::new(SLOTS as usize));
            assert!(pair.connect(Fault::None).await);
            let first = pair.reader.waiting.lock().remove(ADDRESS).unwrap();
            assert!(pair.connect(Fault::None).await);
            pair.reader.waiting.lock().get_mut(ADDRESS).unwrap().extend(first);
            let wanted = chain(0, 12);
            let computing = async {
                let mut put = pair.there.begin_layers(&wanted);
                for layer in 0..LAYERS {
                    // All together longer than a peer is waited for.
                    sleep(PATIENCE * 7 / 8).await;
                    pair.there.compute_layer(&mut put, &wanted, layer);
                }
                put.finish().unwrap();
            };
            let second = async {
                sleep(LAYER).await;
                follow(&pair, &wanted, async {}).await
            };
            let (first, second) = tokio::join!(follow(&pair, &wanted, computing), second);
            assert_eq!((first.blocks, first.copied, first.fault), (12, 12, None));
            assert_eq!((second.blocks, second.copied, second.fault), (12, 0, None));
            pair.heals().await;
        }
    });
}

/// The answer is late, and the slots have another owner by then.
#[test]
fn layers_given_up_while_they_are_copied_are_not_wrong() {
    let mut given_up = 0;
    for at in (0..2 * BLOCK).step_by(13) {
        simulated(async {
            for mut pair in unconnected().await.into_iter().skip(1) {
                if !pair.connect(Fault::Pause(at)).await {
                    return;
                }
                let wanted = chain(0, 12);
                let others = |at| BlockHash::from_u128(1 << 90 | u128::from(at));
                let meanwhile = async {
                    drop(pair.there.compute_layers(&wanted, 2).await);
                    pair.there.compute(&(0..SLOTS).map(others).collect::<Vec<_>>());
                };
                let (never, info) = (CancellationToken::new(), RequestInfo::default());
                let following = pair.reader.follow(asked(&wanted, info, PATIENCE), &never);
                let (pulled, ()) = tokio::join!(following, meanwhile);
                let fault = pulled.ok().and_then(|pulled| pulled.fault).unwrap_or_default();
                given_up += u32::from(fault.contains("given up"));
                for ended in ["received", "sent"] {
                    let wrong = [("direction", ended), ("end", "wrong")];
                    assert_eq!(pair.here.counted("kvbm_peer_leases_total", &wrong), 0, "{at}");
                    assert_eq!(pair.there.counted("kvbm_peer_leases_total", &wrong), 0, "{at}");
                }
                pair.heals().await;
            }
        });
    }
    assert!(given_up > 20, "{given_up}");
}

/// How often a reader of a prompt of one layer gives way.
async fn turns(blocks: usize) -> u32 {
    let mut pair = Pair { are_neighbours: true, ..Pair::new().await };
    assert!(pair.connect(Fault::None).await);
    let (wanted, never, info) =
        (chain(0, blocks), CancellationToken::new(), RequestInfo::default());
    let mut following = Box::pin(pair.reader.follow(asked(&wanted, info, PATIENCE), &never));
    let mut turns = 0;
    let following = std::future::poll_fn(|context| {
        turns += 1;
        following.as_mut().poll(context)
    });
    let computing = async {
        let one = 1.try_into().unwrap();
        let mut put = pair.there.blocks.put_in_layers(info, &wanted, one).unwrap();
        sleep(LAYER).await;
        put.write(|at, part| {
            part.copy_from_slice(&pair.there.content(wanted[at]));
            Ok::<_, Error>(())
        })
        .unwrap();
        put.finish().unwrap();
    };
    assert_eq!(tokio::join!(following, computing).0.unwrap().blocks, blocks);
    turns
}

#[test]
fn a_reader_gives_way_within_a_big_layer() {
    simulated(async {
        let [small, big] = [turns(3).await, turns(12).await];
        assert!(big >= small + 2, "{small}, {big}");
    });
}

#[test]
fn layers_that_hang_end_with_their_agent() {
    simulated(async {
        let (mut pair, double) = with_nixl().await;
        let wanted = chain(0, 12);
        let meanwhile = async {
            let mut put = pair.there.compute_layers(&wanted, 2).await;
            double.set(Reads::Hang);
            pair.there.compute_layer(&mut put, &wanted, 2);
            sleep(TTL / 2).await;
            assert_eq!(pair.here.filling(), 12, "NIXL may still write them");
            sleep(TTL).await;
        };
        let Pulled { blocks, fault, .. } = follow(&pair, &wanted, meanwhile).await;
        assert_eq!((blocks, fault.is_some(), lost(&pair)), (0, true, (0, 0)));
        double.set(Reads::Whole);
        pair.heals().await;
    });
}

#[test]
fn slots_of_late_layers_are_lost_until_they_return() {
    simulated(async {
        for is_cancelled in [false, true] {
            let (mut pair, double) = with_nixl().await;
            let (wanted, cancelled) = (chain(0, 12), CancellationToken::new());
            let info = RequestInfo::default();
            let following = pair.reader.follow(asked(&wanted, info, PATIENCE), &cancelled);
            let meanwhile = async {
                let mut put = pair.there.compute_layers(&wanted, 2).await;
                double.set(Reads::NeverEnd);
                pair.there.compute_layer(&mut put, &wanted, 2);
                sleep(LAYER).await;
                if is_cancelled {
                    cancelled.cancel();
                }
                sleep(2 * TTL).await;
                assert_eq!(lost(&pair), (0, 12));
                drop(put);
            };
            let (pulled, ()) = tokio::join!(following, meanwhile);
            assert_eq!(pulled.unwrap().blocks, 0);
            assert_eq!(pair.here.manager().admin().audit(), []);
            double.end_kept();
            assert_eq!(lost(&pair), (0, 0));
            double.set(Reads::Whole);
            pair.heals().await;
        }
    });
}

#[test]
fn where_nixl_fails_amid_layers_the_rest_comes_by_tcp() {
    simulated(async {
        let (mut pair, double) = with_nixl().await;
        let wanted = chain(0, 12);
        let meanwhile = async {
            let mut put = pair.there.compute_layers(&wanted, 2).await;
            double.set(Reads::Fail);
            for layer in 2..LAYERS {
                pair.there.compute_layer(&mut put, &wanted, layer);
                sleep(LAYER).await;
            }
            put.finish().unwrap();
        };
        let Pulled { blocks, fault, .. } = follow(&pair, &wanted, meanwhile).await;
        assert_eq!((blocks, fault, pair.here.check(&wanted)), (12, None, 12));
        assert_eq!((came_by(&pair, "nixl"), came_by(&pair, "tcp")), (0, 12));
        double.set(Reads::Whole);
        pair.heals().await;
    });
}
