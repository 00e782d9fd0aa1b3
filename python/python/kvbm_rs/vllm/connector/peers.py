"""Prompts that another engine has computed, or computes now: what it holds of them comes here before they are looked up.

A proxy sends a prompt to one engine, and to another one where the first serves its peers: after the first has answered, as it
does with vLLM's `NixlConnector`, or to both at once, as with vLLM's `p2p` tier. The first engine saves the prompt's blocks to its
tiers as always. The second leases them there and brings them into its host tier, as they come to be there. Of a prompt that was
computed, what comes goes on into the request's own blocks at once; else it is a hit like any other once it has come. What does not
come in time the second engine computes, or the request fails, as `kv_load_failure_policy` says.

| in `kv_transfer_params` | the peer | nothing more of it is waited for |
|---|---|---|
| `do_remote_prefill` | has computed the prompt, and its last blocks may be on their way to its tiers | a quarter of a second after the last that came, or under `fail` `peer_timeout_ms` after the first look-up |
| `remote_prefiller` | computes it now | `peer_timeout_ms` after the last that came |
| `remote_kv_source` | may have some of it | at once |

The first engine is told of one that reads meanwhile by `remote_decoder`, an object with any content, and then saves layer by layer.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvbm_rs import Chain
from kvbm_rs.errors import KvbmError
from kvbm_rs.vllm import logger

if TYPE_CHECKING:
    from kvbm_rs import Hints, Load, Manager, Pull
    from kvbm_rs.vllm.connector.config import Config
    from vllm.v1.request import Request

# Seconds between two looks at a list of peers that lacks one; and after which no more of a prompt that was computed is waited for
# if none came, unless a request fails without it.
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
    """A prompt that a peer has computed, or computes."""

    # `None`: none that is known here by now.
    peer: str | None
    said: dict[str, Any]
    # Leading tokens whose blocks it keeps, or will.
    tokens: int
    # Seconds without a block after which no more is waited for.
    patience: float
    # Of its blocks, where they have other names than ours: tokens, and behind how many each name is. And the names, once they
    # are known.
    other: tuple[int, int] | None = None
    there: tuple[int, Chain] | None = None
    # Whether a request fails without it, where `kv_load_failure_policy` says so.
    is_owed: bool = True
    # Whether it still computes: then only its pauses are limited.
    is_under_way: bool = False
    # Since the first look-up, as a request may wait long for its turn.
    started: float | None = None
    pull: "Pull | None" = None


class Prefills:
    """Reads at peers what they have computed for requests."""

    def __init__(self, manager: "Manager", config: "Config") -> None:
        self._manager, self._block_tokens, self._seconds = manager, config.block_tokens, config.peer_seconds
        self._fails = config.fails
        self._max_pause = self._seconds if config.fails else _MAX_PAUSE
        self._engine, self._groups = config.engine, len(config.groups)
        self._workers, self._stages = config.workers, config.stages
        # Windows are as of the last block, which the engine is told before anything has come.
        self._promises = not config.is_windowed
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
            "tp_size": self._workers,
            "dcp_size": 1,
            "pp_size": self._stages,
            "transfer_mode": "pull",
            _PEER: name,
            _TOKENS: [self._block_tokens, self._hash_tokens],
        }

    def is_followed(self, request: "Request") -> bool:
        """Whether another engine reads this prompt while it is computed here. With vLLM's proxies (`do_remote_decode`) none does: it
        is asked after this one has answered."""
        return isinstance(_said(request).get("remote_decoder"), dict)

    def of(self, request: "Request") -> Prefilled | None:
        """Where this request's prompt was computed, or is, if it says so."""
        said = _said(request)
        if said.get("do_remote_prefill") and (said.get(_PEER) or said.get("remote_host")):
            if self._manager.peer() is None and _PEER not in said:
                # Another connector beside this one brings it.
                return None
            tokens = said.get("remote_num_tokens")
            tokens = tokens if type(tokens) is int else request.num_prompt_tokens
            return self._prefilled(said, min(max(tokens, 0), request.num_prompt_tokens), self._max_pause)
        if isinstance(computing := said.get("remote_prefiller"), dict):
            return self._prefilled(computing, request.num_prompt_tokens, self._seconds, is_under_way=True)
        if isinstance(source := said.get("remote_kv_source"), dict):
            return self._prefilled(source, request.num_prompt_tokens, patience=0.0, is_owed=False)
        return None

    def _prefilled(self, said: dict[str, Any], tokens: int, patience: float, **flags: bool) -> Prefilled:
        other = self._other(said)
        if other is not None:
            tokens -= tokens % other[0]
        return Prefilled(self._known(said), said, tokens, patience, other, **flags)

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

    def owed(self, prefilled: Prefilled, most: int) -> int:
        """How many leading blocks a request fails without."""
        return self.blocks(prefilled, most) if self._fails and prefilled.is_owed else 0

    def promised(self, prefilled: Prefilled, most: int) -> int:
        """How many leading blocks a request is promised before they are here: those of a prompt that was computed. Its own blocks
        are held meanwhile, which would be for long where the peer still computes. The time that it waits counts from here, and anew
        from the beginning of its load: until then it may wait for room in the engine."""
        prefilled.started = prefilled.started or time.monotonic()
        is_promised = self._promises and prefilled.is_owed and not prefilled.is_under_way and prefilled.peer is not None
        return self.blocks(prefilled, most) if is_promised else 0

    def load(
        self, prefilled: Prefilled, chain: "Chain", slots: list[tuple[int, int, list[int]]], number: int, hints: "Hints | None"
    ) -> "Load":
        """Brings what was promised, up to the last of these slots."""
        ((_, first, blocks),) = slots
        prefilled.started = time.monotonic()
        return self._manager.follow_into(
            prefilled.peer,
            chain,
            slots,
            seconds=prefilled.patience,
            most=first + len(blocks),
            there=prefilled.there,
            request=number,
            hints=hints,
        )

    def is_late(self, prefilled: Prefilled) -> bool:
        """Whether no more of what was promised is waited for."""
        return time.monotonic() > prefilled.started + self._seconds

    def has_ended(
        self, prefilled: Prefilled, chain: "Chain", most: int, number: int, hints: "Hints | None", seconds: float
    ) -> bool:
        """Whether nothing more of it comes. Waits `seconds` at most."""
        if prefilled.peer is None:
            return self._stays_unknown(prefilled, seconds)
        try:
            if prefilled.pull is None:
                wanted = self.blocks(prefilled, most)
                prefilled.pull = self._manager.follow(
                    prefilled.peer,
                    chain,
                    seconds=prefilled.patience,
                    most=wanted,
                    there=prefilled.there,
                    request=number,
                    hints=hints,
                )
            ended = prefilled.pull.wait(seconds)
        except KvbmError as error:
            logger.warning("what %s computed does not come: %s", prefilled.peer, error)
            return True
        if ended is None and not prefilled.is_under_way and self.is_late(prefilled):
            prefilled.pull.cancel()
            return True
        if ended is not None and ended.fault:
            logger.warning("%d blocks came from %s: %s", ended.copied, prefilled.peer, ended.fault)
        return ended is not None

    def _stays_unknown(self, prefilled: Prefilled, seconds: float) -> bool:
        """Whether a peer that is not on the list comes too late: the list may be a moment old."""
        prefilled.peer = self._known(prefilled.said)
        if prefilled.peer is not None:
            return False
        if time.monotonic() < prefilled.started + min(self._max_pause, prefilled.patience):
            time.sleep(min(seconds, _PAUSE))
            return False
        names = (prefilled.said.get(name) for name in (_PEER, "remote_host", "remote_port"))
        logger.warning("no peer is known that is %.100r at %.100r:%.100r, so what it computed is not read", *names)
        return True


def _said(request: "Request") -> dict[str, Any]:
    """What clients send may be anything."""
    said = request.kv_transfer_params
    return said if isinstance(said, dict) else {}
