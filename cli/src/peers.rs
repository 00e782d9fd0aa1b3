//! `kvbm peers`: the workers that the settings list, what each has, and why one cannot be read.

use kvbm::{PeerOffer, PeerReport, look_at_peers};
use serde::Serialize;

use crate::GlobalOptions;
use crate::output::{self, CommandFailure};
use crate::stop;

/// Serialises to the command's JSON.
#[derive(Debug, Serialize)]
struct Peers {
    peers: Vec<PeerReport>,
}

pub(crate) fn run(global: &GlobalOptions) -> Result<(), CommandFailure> {
    let settings = global.load(|loader| loader)?.settings;
    let peers = stop::runtime()?.block_on(look_at_peers(&settings))?;
    global.show(&Peers { peers }, Peers::to_text)
}

impl Peers {
    fn to_text(&self) -> String {
        if self.peers.is_empty() {
            return "no peer is listed; name some with peers.addresses (DYN_KVBM_PEERS_ADDRESSES), peers.file or \
                    peers.etcd"
                .to_owned();
        }
        let mut table = output::table(
            &["peer", "address", "model, or what is wrong", "block", "fingerprint"],
            5,
        );
        for peer in &self.peers {
            table.add_row(row(peer));
        }
        table.to_string()
    }
}

fn row(peer: &PeerReport) -> Vec<String> {
    let mut row = vec![peer.name.clone(), peer.address.clone()];
    match &peer.offer {
        Some(PeerOffer { block_bytes, fingerprint, .. }) => row.extend([
            format!("{} {} {}", fingerprint.model, fingerprint.weights, fingerprint.dtype),
            format!("{}, {} tokens", output::bytes(*block_bytes), fingerprint.block_tokens),
            fingerprint.to_string(),
        ]),
        None => row.push(peer.problem.clone().unwrap_or_default()),
    }
    row
}
