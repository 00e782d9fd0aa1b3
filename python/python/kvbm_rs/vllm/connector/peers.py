"""Prompts that another engine has computed: what it holds of them comes here before they are looked up.

A proxy sends a prompt to one engine with `do_remote_decode` in `kv_transfer_params`, and to another one what the first has
answered, as it does with vLLM's `NixlConnector`. The first engine saves the prompt's blocks to its tiers as always, and says where
it serves its peers. The second leases them there and brings them into its host tier; from there on they are a hit like any other.
What does not come in time it computes, or the request fails, as `kv_load_failure_policy` says.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvbm_rs import Chain
from kvbm_rs.errors import FullError, KvbmError
from kvbm_rs.vllm import logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvbm_rs import Hints, Manager, PeerLeasing, Pull
    from kvbm_rs.vllm.connector.config import Config
    from vllm.v1.request import Request

# Seconds between two requests for a lease, where the peer's last blocks are still on their way to its tiers; and after which no
# more are waited for if none came, unless a request fails without them.
_PAUSE, _MAX_PAUSE = 0.005, 0.25

# What names the peer in lists of ours. Proxies that build parameters anew keep its address alone.
_PEER = "kvbm_peer"

# Tokens of its blocks, and those behind each of which it has a name.
_TOKENS = "kvbm_block_tokens"

# No engine has a name for fewer tokens, which would take long to make.
_FEWEST = 16

# How a request ends whose prompt was computed.
_COMPUTED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass
class Prefilled:
    """A prompt that a peer has computed."""

    # `None`: none that is known here by now.
    peer: str | None
    said: dict[str, Any]
    # Leading tokens whose blocks it keeps.
    tokens: int
    # Of its blocks, where they have other names than ours: tokens, and behind how many each name is. And the names, once they
    # are known.
    other: tuple[int, int] | None = None
    there: tuple[int, Chain] | None = None
    # From when and until when they are waited for: since the first look-up, as a request may wait long for its turn.
    started: float = 0.0
    until: float | None = None
    # Leading blocks that it had last, and since when. It is asked again at `next`.
    found: int = -1
    since: float = 0.0
    next: float = 0.0
    leasing: "PeerLeasing | None" = None
    pull: "Pull | None" = None
    # The peer has more than it leased at a time.
    is_cut: bool = False


class Prefills:
    """Reads at peers what they have computed for requests."""

    def __init__(self, manager: "Manager", config: "Config") -> None:
        self._manager, self._block_tokens, self._seconds = manager, config.block_tokens, config.peer_seconds
        self._max_pause = self._seconds if config.fails else _MAX_PAUSE
        self._engine, self._world, self._groups = config.engine, config.world, len(config.groups)
        self._hash_tokens, self._names_of, self._knows_rows = config.hash_tokens, config.names_of, config.knows_rows

    def answer(self, request: "Request") -> dict[str, Any] | None:
        """What the engine that goes on with this request must know, in the form of vLLM's `NixlConnector`. `None`: none
        does, or it cannot read here."""
        said, own = _said(request), self._manager.peer()
        if not said.get("do_remote_decode") or own is None or request.status not in _COMPUTED:
            return None
        name, address = own
        host, _, port = address.rpartition(":")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine,
            "remote_request_id": request.request_id,
            # Blocks are asked for by what they hold, and not by where the engine had them.
            "remote_block_ids": [[] for _ in range(self._groups)],
            "remote_host": host.strip("[]"),
            "remote_port": int(port),
            "remote_num_tokens": request.num_prompt_tokens,
            # None of the engine's blocks are held for it.
            "remote_blocks_expiry_time": None,
            "tp_size": self._world,
            "dcp_size": 1,
            "pp_size": 1,
            "transfer_mode": "pull",
            _PEER: name,
            _TOKENS: [self._block_tokens, self._hash_tokens],
        }

    def of(self, request: "Request") -> Prefilled | None:
        """Where this request's prompt was computed, if it says so."""
        said = _said(request)
        if not (said.get("do_remote_prefill") and (said.get(_PEER) or said.get("remote_host"))):
            return None
        if self._manager.peer() is None and _PEER not in said:
            # Another connector beside this one brings it.
            return None
        tokens = said.get("remote_num_tokens")
        tokens = tokens if type(tokens) is int else request.num_prompt_tokens
        tokens = min(max(tokens, 0), request.num_prompt_tokens)
        other = self._other(said)
        if other is not None:
            tokens -= tokens % other[0]
        return Prefilled(self._known(said), said, tokens, other)

    def _other(self, said: dict[str, Any]) -> tuple[int, int] | None:
        """What the peer says of its blocks, if that makes other names. A proxy may have left it out, and a client may say anything."""
        own = self._block_tokens
        match said.get(_TOKENS):
            case [int(block), int(name)] if _FEWEST <= name <= block and block % name == 0 and self._knows_rows:
                is_other = (block, name) != (own, self._hash_tokens)
                return (block, name) if is_other and max(block, own) % min(block, own) == 0 else None
        return None

    def names_there(self, prefilled: Prefilled, request: "Request", salt: bytes) -> None:
        """Has the prompt's blocks named as the peer names them."""
        if prefilled.other is None or prefilled.there is not None:
            return
        block, name = prefilled.other
        hashes = self._names_of(request, name)[block // name - 1 :: block // name]
        prefilled.there = block, Chain(hashes, salt=salt)

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

    def blocks(self, prefilled: Prefilled, most: int) -> int:
        """How many leading blocks the peer has computed, `most` at most."""
        return min(most, prefilled.tokens // self._block_tokens)

    def has_ended(
        self, prefilled: Prefilled, chain: "Chain", most: int, number: int, hints: "Hints | None", seconds: float
    ) -> bool:
        """Whether nothing more of it comes. Waits `seconds` at most."""
        ask = lambda: self._manager.lease_at(
            prefilled.peer, chain, most=most, there=prefilled.there, request=number, hints=hints
        )
        if prefilled.until is None:
            prefilled.started = time.monotonic()
            prefilled.until = prefilled.started + self._seconds
        if prefilled.peer is None:
            return self._stays_unknown(prefilled, seconds)
        try:
            return self._go_on(prefilled, ask, self.blocks(prefilled, most), seconds)
        except FullError as error:
            # What others lease there comes to an end.
            now = time.monotonic()
            prefilled.leasing, prefilled.next = None, now + _PAUSE
            if now < min(prefilled.until, prefilled.started + self._max_pause):
                return False
            logger.warning("what %s computed does not come: %s", prefilled.peer, error)
            return True
        except KvbmError as error:
            logger.warning("what %s computed does not come: %s", prefilled.peer, error)
            return True

    def _stays_unknown(self, prefilled: Prefilled, seconds: float) -> bool:
        """Whether a peer that is not on the list comes too late: the list may be a moment old."""
        prefilled.peer = self._known(prefilled.said)
        if prefilled.peer is not None:
            return False
        if time.monotonic() < min(prefilled.until, prefilled.started + self._max_pause):
            time.sleep(min(seconds, _PAUSE))
            return False
        names = (prefilled.said.get(name) for name in (_PEER, "remote_host", "remote_port"))
        logger.warning("no peer is known that is %.100r at %.100r:%.100r, so what it computed is not read", *names)
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
            if ended is not None and prefilled.is_cut and not ended.fault and now < prefilled.until:
                # The rest is leased now that this is here.
                prefilled.pull = None
                return False
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
        if lease.blocks < wanted and not lease.is_cut and now < min(prefilled.until, prefilled.since + self._max_pause):
            # Its last blocks are still on their way to its tiers.
            prefilled.next = now + _PAUSE
            return False
        if not lease.only_there:
            return True
        prefilled.pull, prefilled.is_cut = self._manager.pull(lease), lease.is_cut
        return False


def _said(request: "Request") -> dict[str, Any]:
    """What clients send may be anything."""
    said = request.kv_transfer_params
    return said if isinstance(said, dict) else {}
