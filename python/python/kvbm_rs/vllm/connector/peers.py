"""Prompts that another engine has computed: what it holds of them comes here before they are looked up.

A proxy sends a prompt to one engine with `do_remote_decode` in `kv_transfer_params`, and to another one what the first has
answered, as it does with vLLM's `NixlConnector`. The first engine saves the prompt's blocks to its tiers as always, and says where
it serves its peers. The second leases them there and brings them into its host tier; from there on they are a hit like any other.
What does not come in time it computes.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbm_rs.errors import KvbmError
from kvbm_rs.vllm import logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvbm_rs import Chain, Hints, Manager, PeerLeasing, Pull
    from vllm.v1.request import Request

# Seconds between two requests for a lease, where the peer's last blocks are still on their way to its tiers; and after which no
# more are waited for if none came.
_PAUSE, _MAX_PAUSE = 0.005, 0.25

# What names the peer in lists of ours. Proxies that build parameters anew keep its address alone.
_PEER = "kvbm_peer"


@dataclass
class Prefilled:
    """A prompt that a peer has computed."""

    peer: str
    # Leading tokens whose blocks it keeps.
    tokens: int
    # Until when they are waited for: it counts from the first look-up, since a request may wait long for its turn.
    until: float | None = None
    # Leading blocks that it had last, and since when. It is asked again at `next`.
    found: int = -1
    since: float = 0.0
    next: float = 0.0
    leasing: "PeerLeasing | None" = None
    pull: "Pull | None" = None


class Prefills:
    """Reads at peers what they have computed for requests."""

    def __init__(self, manager: "Manager", block_tokens: int, seconds: float) -> None:
        self._manager, self._block_tokens, self._seconds = manager, block_tokens, seconds

    def answer(self, request: "Request", engine: str | None) -> dict[str, Any] | None:
        """What the engine that goes on with this request must know. `None`: none does, or it cannot read here."""
        said, own = _said(request), self._manager.peer()
        if not said.get("do_remote_decode") or own is None:
            return None
        name, address = own
        host, _, port = address.rpartition(":")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": engine,
            "remote_request_id": request.request_id,
            # Blocks are asked for by what they hold, and not by where the engine had them.
            "remote_block_ids": [],
            "remote_host": host.strip("[]"),
            "remote_port": int(port),
            "remote_num_tokens": request.num_prompt_tokens,
            "tp_size": 1,
            _PEER: name,
        }

    def of(self, request: "Request") -> Prefilled | None:
        """Where this request's prompt was computed, if it says so and is to be believed."""
        said = _said(request)
        if not said.get("do_remote_prefill"):
            return None
        peer = self._known(said)
        if peer is None:
            logger.warning(
                "request %s: no peer is known that is %.100r at %.100r:%.100r, so its prompt is computed here",
                request.request_id,
                said.get(_PEER),
                said.get("remote_host"),
                said.get("remote_port"),
            )
            return None
        tokens = said.get("remote_num_tokens")
        tokens = tokens if type(tokens) is int else request.num_prompt_tokens
        return Prefilled(peer, min(max(tokens, 0), request.num_prompt_tokens))

    def _known(self, said: dict[str, Any]) -> str | None:
        """Only who is on the list of peers: a request must not name anybody else."""
        peers, name = self._manager.peers(), said.get(_PEER)
        if isinstance(name, str) and name in peers:
            return name
        host, port = said.get("remote_host"), said.get("remote_port")
        if not isinstance(host, str) or type(port) is not int:
            return None
        addresses = (f"{host}:{port}", f"[{host}]:{port}")
        return next((name for name, address in peers.items() if address in addresses), None)

    def has_ended(
        self, prefilled: Prefilled, chain: "Chain", most: int, number: int, hints: "Hints | None", seconds: float
    ) -> bool:
        """Whether nothing more of it comes. Waits `seconds` at most."""
        ask = lambda: self._manager.lease_at(prefilled.peer, chain, most=most, request=number, hints=hints)
        if prefilled.until is None:
            prefilled.until = time.monotonic() + self._seconds
        try:
            return self._go_on(prefilled, ask, min(most, prefilled.tokens // self._block_tokens), seconds)
        except KvbmError as error:
            logger.warning("what %s computed is computed here: %s", prefilled.peer, error)
            return True

    def _go_on(self, prefilled: Prefilled, ask: "Callable[[], PeerLeasing]", wanted: int, seconds: float) -> bool:
        now = time.monotonic()
        if prefilled.pull is not None:
            ended = prefilled.pull.wait(seconds)
            if ended is not None and ended.fault:
                logger.warning("%d blocks came from %s: %s", ended.copied, prefilled.peer, ended.fault)
            if ended is None and now > prefilled.until:
                prefilled.pull.cancel()
                return True
            return ended is not None
        if prefilled.leasing is None:
            if now < prefilled.next:
                time.sleep(min(seconds, prefilled.next - now))
                return False
            prefilled.leasing = ask()
        lease = prefilled.leasing.wait(seconds)
        if lease is None:
            return now > prefilled.until
        prefilled.leasing = None
        if lease.blocks > prefilled.found:
            prefilled.found, prefilled.since = lease.blocks, now
        if lease.blocks < wanted and not lease.is_cut and now < min(prefilled.until, prefilled.since + _MAX_PAUSE):
            # Its last blocks are still on their way to its tiers.
            prefilled.next = now + _PAUSE
            return False
        if not lease.only_there:
            return True
        prefilled.pull = self._manager.pull(lease)
        return False


def _said(request: "Request") -> dict[str, Any]:
    """What clients send may be anything."""
    said = request.kv_transfer_params
    return said if isinstance(said, dict) else {}
