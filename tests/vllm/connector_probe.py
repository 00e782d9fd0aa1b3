"""What tests of the connector look at inside the engine's process."""


def _connector(engine):
    """Ours, also where it is one of several."""
    from kvbm_rs.vllm.connector import KvbmConnector

    connector = engine.core.scheduler.connector
    parts = getattr(connector, "sub_connectors", [connector])
    return next(part for part in parts if isinstance(part, KvbmConnector))


def left(engine) -> dict:
    """What is kept of requests, and blocks of the engine's that are in use: the null block always is."""
    scheduler = _connector(engine)._scheduler
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    return {
        "requests": len(scheduler._requests),
        "loading": len(scheduler._loading),
        "saving": len(scheduler._saving),
        "ending": len(scheduler._ending),
        "pinning": len(scheduler._pinning),
        "used_blocks": pool.num_gpu_blocks - pool.get_num_free_blocks(),
    }


def drain(engine) -> bool:
    return _connector(engine)._scheduler.manager.drain(30.0)


def flush_log(engine) -> None:
    """Has all told that the native side has said."""
    from kvbm_rs._native import flush_log

    flush_log()


def watch(engine) -> None:
    """From here on counts hits by tier, and preemptions."""
    connector, scheduler = _connector(engine), engine.core.scheduler
    engine.sources, engine.preempted = {}, 0
    sources, preempt = connector.get_external_cache_hit_sources, scheduler._preempt_request

    def counted_sources(request, tokens):
        found = sources(request, tokens)
        for source, number in found.items():
            engine.sources[source.value] = engine.sources.get(source.value, 0) + number
        return found

    def counted_preempt(*args, **kwargs):
        engine.preempted += 1
        return preempt(*args, **kwargs)

    connector.get_external_cache_hit_sources = counted_sources
    scheduler._preempt_request = counted_preempt


def watched(engine) -> dict:
    return {"sources": engine.sources, "preempted": engine.preempted}


def spoil_next_load(engine, group: int = 0) -> None:
    """Overwrites what the next load brings to a cache group, once it has arrived."""
    worker = _worker()
    begin = worker.begin

    def spoiled(told):
        if told.loaded:
            for tensor in worker._tensors[group]:
                # States are bytes.
                tensor.mul_(-3) if tensor.is_floating_point() else tensor.zero_()
            worker.begin = begin
        begin(told)

    worker.begin = spoiled


def spoil_next_save(engine) -> None:
    """Has the next save keep other bytes than were computed, under a checksum of theirs."""
    scheduler, (tensors,) = _connector(engine)._scheduler, _worker()._tensors
    start = scheduler._start

    def spoiled(*arguments, **named):
        for tensor in tensors:
            tensor.mul_(-3)
        scheduler._start = start
        start(*arguments, **named)

    scheduler._start = spoiled


def shadowed(engine) -> dict:
    """Blocks that were compared with what was computed again, by verdict."""
    samples = {name: values for name, _, _, values in _connector(engine)._scheduler.manager.samples()}
    return {labels["verdict"]: int(value) for labels, value in samples.get("kvbm_shadow_blocks_total", ()) if value}


def blocks_by_worker(engine) -> list[list[str]]:
    """Digests of the blocks of each worker in which there is something."""
    return engine.llm.collective_rpc(_digests)


def _digests(_) -> list[str]:
    import hashlib

    import torch

    (tensors,) = _worker()._tensors
    assert all(tensor.is_contiguous() for tensor in tensors)
    found = []
    for block in range(1, len(tensors[0])):
        if any(tensor[block].any() for tensor in tensors):
            parts = b"".join(tensor[block].flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors)
            found.append(hashlib.sha256(parts).hexdigest())
    return found


def worker_processes(engine) -> list[int]:
    return engine.llm.collective_rpc(_process)


def _process(_) -> int:
    import os

    return os.getpid()


def run_stages_once(engine) -> None:
    """vLLM 0.32 forgets to on a CPU if it compiles nothing, and a stage that has never run has no room for what the one before it
    sends."""
    engine.llm.collective_rpc(_run_once)


def _run_once(worker) -> None:
    worker.model_runner._dummy_run(worker.model_runner.max_num_tokens)


def _worker():
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker


def abort_after(engine, prompt: list[int], steps: int) -> None:
    """Asks for `prompt`, lets the engine take `steps` steps, and takes it back."""
    from vllm import SamplingParams

    asked = engine.llm.llm_engine
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    name = asked.add_request("aborted", {"prompt_token_ids": prompt}, greedy)
    for _ in range(steps):
        asked.step()
    asked.abort_request([name or "aborted"], internal=name is not None)
    while asked.has_unfinished_requests():
        asked.step()


def converse(engine, chunks: list[list[int]]) -> list[int]:
    """Runs a session that is given its prompt in chunks, and says a token after each. Returns what it said: vLLM leaves each but
    the last one out when it goes on."""
    from vllm import SamplingParams

    asked, said, name = engine.llm.llm_engine, [], None
    greedy = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    for chunk in chunks:
        request = asked.input_processor.process_inputs(
            "session", {"prompt_token_ids": chunk}, greedy, supported_tasks=asked.get_supported_tasks(), resumable=True
        )
        request.request_id = name = name or "session-1"
        said += _said(asked, request)
    asked.engine_core.abort_requests([name])
    return said


def _said(asked, request) -> list[int]:
    asked.engine_core.add_request(request)
    for _ in range(1000):
        for output in asked.engine_core.get_output().outputs:
            if output.new_token_ids:
                return list(output.new_token_ids)
    raise TimeoutError("nothing was said")


def load_times(engine, prompt: list[int], rounds: int) -> dict:
    """Seconds that the blocks of a prompt take from the host tier to unused slots, and as many bytes by memcpy, with as
    many threads. The engine has computed the prompt, and forgotten it."""
    import ctypes
    import time
    from concurrent.futures import ThreadPoolExecutor

    import torch

    from kvbm_rs import Chain

    scheduler = _connector(engine)._scheduler
    block = engine.core.scheduler.cache_config.block_size
    blocks = len(prompt) // block
    hashes = _hashes(engine, prompt)
    (tensors,) = _worker()._tensors
    slots = list(range(1, blocks + 1))
    # The blocks of a layer lie one after the other: a run each, as few calls as there can be.
    run = blocks * tensors[0][1].numel() * tensors[0].element_size()
    assert all(tensor.is_contiguous() for tensor in tensors)
    source = torch.zeros(len(tensors) * run, dtype=torch.uint8)
    runs = [(tensor[1].data_ptr(), source.data_ptr() + at * run) for at, tensor in enumerate(tensors)]
    halves = runs[: len(runs) // 2], runs[len(runs) // 2 :]

    memmove = ctypes.CDLL(None).memmove
    memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

    def copy(part):
        for target, start in part:
            # It lets go of the interpreter.
            memmove(target, start, run)

    load, plain = [], []
    with ThreadPoolExecutor(2) as threads:
        for _ in range(rounds):
            lease = scheduler.manager.lease(Chain(hashes, salt=scheduler._weights))
            assert lease.by_tier == {"host": blocks}, lease.by_tier
            began = time.perf_counter()
            end = scheduler.manager.load_into(lease, [(0, 0, slots)]).wait(10.0)
            load.append(time.perf_counter() - began)
            assert end.arrived == blocks
            began = time.perf_counter()
            list(threads.map(copy, halves))
            plain.append(time.perf_counter() - began)
    return {"load": load, "memcpy": plain, "ratios": [one / other for one, other in zip(load, plain)]}


def first_block(engine, prompt: list[int]) -> list[list[float]]:
    """Of each layer the numbers of a prompt's first block, which the host tier has."""
    import torch

    from kvbm_rs import Chain

    scheduler = _connector(engine)._scheduler
    lease = scheduler.manager.lease(Chain(_hashes(engine, prompt)[:1], salt=scheduler._weights))
    # An unused slot.
    assert scheduler.manager.load_into(lease, [(0, 0, [1])]).wait(10.0).arrived == 1
    (tensors,) = _worker()._tensors
    types = [torch.float8_e4m3fn if tensor.dtype == torch.uint8 else tensor.dtype for tensor in tensors]
    return [tensor[1].flatten().view(kind).float().tolist() for tensor, kind in zip(tensors, types)]


def _hashes(engine, prompt) -> list[bytes]:
    """Hashes of the full blocks of a prompt, as the engine makes them."""
    found = []
    connector = _connector(engine)
    look_up = connector.get_num_new_matched_tokens

    def noted(request, computed):
        found.append(list(request.block_hashes))
        return look_up(request, computed)

    connector.get_num_new_matched_tokens = noted
    try:
        engine.generate([prompt], 1)
    finally:
        del connector.get_num_new_matched_tokens
    assert engine.settle() and engine.llm.reset_prefix_cache()
    return found[0]


def core_process(engine) -> int:
    """Of an engine whose EngineCore is in a process of its own."""
    return engine.core_process()


def metrics(engine) -> dict:
    """By name all that vLLM's registry has, with the labels that are not the same for all."""
    found = {}
    for metric in engine.llm.get_metrics():
        labels = {name: value for name, value in metric.labels.items() if name not in ("engine", "model_name")}
        if hasattr(metric, "value"):
            found.setdefault(metric.name, []).append((labels, metric.value))
    return found


def requested_tokens(engine) -> int:
    """Tokens that requests were counted with."""
    found = _connector(engine)._scheduler.manager.samples()
    (values,) = [values for name, *_, values in found if name == "kvbm_requested_tokens_total"]
    return int(sum(value for *_, value in values))


def occupancy(engine) -> dict:
    """Slots of each tier: in all, and with a block."""
    return _connector(engine)._scheduler.manager.occupancy()


def sleep(engine, prompts: list[list[int]] = (), steps: int = 0, mode: str = "abort") -> list[list[int]]:
    """Puts it to sleep after `steps` steps of `prompts`, and wakes it. Returns what they said if they were kept."""
    names = begin(engine, prompts, steps)
    engine.llm.sleep(level=1, mode=mode)
    engine.llm.wake_up()
    if mode == "abort":
        # The front end is not told.
        engine.llm.llm_engine.abort_request(names, internal=True)
    return finish(engine)


def exchange_weights(engine, prompt: list[int]) -> None:
    """Gives the model other weights while it computes `prompt`; the second call gives it the first ones again."""
    begin(engine, [prompt], steps=2)
    engine.llm.apply_model(_exchange)
    assert engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    finish(engine)


def _exchange(model) -> None:
    model.model.embed_tokens.weight.data.neg_()


def begin(engine, prompts: list[list[int]], steps: int) -> list[str]:
    """Asks for prompts, and lets the engine take `steps` steps. Returns the requests' names."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    asked = engine.llm.llm_engine
    names = [
        asked.add_request(f"begun {number}", {"prompt_token_ids": prompt}, greedy)
        for number, prompt in enumerate(prompts)
    ]
    for _ in range(steps):
        asked.step()
    return names


def finish(engine) -> list[list[int]]:
    """Steps until every request has ended. Returns what those that did so now have said."""
    asked, ended = engine.llm.llm_engine, {}
    while asked.has_unfinished_requests():
        ended |= {output.request_id: list(output.outputs[0].token_ids) for output in asked.step() if output.finished}
    return [ended[name] for name in sorted(ended)]


def peer(engine) -> list[str]:
    """Its name and address among its peers."""
    return list(_connector(engine)._scheduler.manager.peer())


def ask(
    engine,
    prompt: list[int],
    params: dict | None = None,
    actions: list = (),
    wait: float = 0.0,
    tokens: int = 8,
    salt: str | None = None,
    adapter: str | None = None,
) -> dict:
    """Asks for a prompt with `kv_transfer_params` and actions of `kv_hints`, and waits before its first step."""
    import time

    from vllm import SamplingParams
    from vllm.v1.kv_hints.protocol import KvHintAction, KvHintsEnvelope

    extra = {"extra_args": {"kv_transfer_params": params}} if params else {}
    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **extra)
    hints = KvHintsEnvelope("0.1", "m1", [KvHintAction(*action) for action in actions]) if actions else None
    asked, before, began = engine.llm.llm_engine, engine.scheduled, time.monotonic()
    salted = {} if salt is None else {"cache_salt": salt}
    lora = engine.adapter(adapter)
    asked.add_request("asked", {"prompt_token_ids": prompt, **salted}, greedy, lora_request=lora, kv_hints=hints)
    time.sleep(wait)
    waited = _matches(engine, engine.core.scheduler.waiting.peek_request().block_hashes)
    output = _ended(asked)
    return {
        "said": list(output.outputs[0].token_ids),
        "ended": output.outputs[0].finish_reason,
        "params": output.kv_transfer_params,
        "waited": waited,
        "scheduled": engine.scheduled - before,
        "seconds": time.monotonic() - began,
    }


def _ended(asked):
    """Steps until the one request has ended. Returns its output."""
    while not (ended := [output for output in asked.step() if output.finished]):
        pass
    (output,) = ended
    return output


class _SlowReader:
    """A manager that has a lease at a peer before it says so."""

    def __init__(self, manager):
        self._manager, self._leasing, self.lease, self.is_held = manager, None, None, True
        self._load = None

    def __getattr__(self, name):
        return getattr(self._manager, name)

    def follow_into(self, peer, chain, slots, *, seconds, **named):
        self._slots, self._ask = slots, lambda: self._manager.lease_at(peer, chain, **named)
        self._leasing = self._ask()
        return self

    def wait(self, seconds):
        if self.lease is None:
            self.lease = self._leasing.wait(seconds)
            if self.lease is not None and not self.lease.blocks:
                # It is still on its way to the peer's tiers.
                self.lease, self._leasing = None, self._ask()
        if self.is_held or self.lease is None:
            return None
        self._load = self._load or self._manager.load_into(self.lease, self._slots)
        return self._load.wait(seconds)

    def cancel(self):
        if self._load is not None:
            self._load.cancel()


def lease_and_wait(engine, prompt: list[int], params: dict) -> int:
    """Asks for a prompt that a peer has computed, and holds it between its lease there and the copy. Returns how many blocks are
    leased."""
    from vllm import SamplingParams

    prefills = _connector(engine)._scheduler._prefills
    reader = prefills._manager = _SlowReader(prefills._manager)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, extra_args={"kv_transfer_params": params})
    engine.llm.llm_engine.add_request("held", {"prompt_token_ids": prompt}, greedy)
    while reader.lease is None:
        engine.llm.llm_engine.step()
    return reader.lease.blocks


def go_on(engine) -> dict:
    """Lets go of the request that is held. Returns what it said."""
    prefills, before = _connector(engine)._scheduler._prefills, engine.scheduled
    reader = prefills._manager
    reader.is_held, prefills._manager = False, reader._manager
    output = _ended(engine.llm.llm_engine)
    return {
        "said": list(output.outputs[0].token_ids),
        "ended": output.outputs[0].finish_reason,
        "scheduled": engine.scheduled - before,
    }


def matches(engine, prompt: list[int]) -> dict:
    """Leading blocks of a prompt by tier."""
    return _connector(engine)._scheduler.manager.matches(_chain(engine, _hashes(engine, prompt)))


def _matches(engine, hashes: list[bytes]) -> dict:
    return _connector(engine)._scheduler.manager.matches(_chain(engine, hashes))


def _hashes(engine, prompt: list[int]) -> list[bytes]:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    return Request("named", prompt, SamplingParams(), None, block_hasher=engine.core.request_block_hasher).block_hashes


def _chain(engine, hashes: list[bytes]):
    from kvbm_rs import Chain

    return Chain(hashes, salt=_connector(engine)._scheduler._weights)


def token_times(engine, tokens: int, read: list[list[int]], peer: str) -> dict:
    """Seconds for each of these tokens, while this engine reads these prompts at a peer, again and again; and how many of
    their blocks came meanwhile."""
    import threading
    import time

    from vllm import SamplingParams

    asked, manager = engine.llm.llm_engine, _connector(engine)._scheduler.manager
    chains = [_chain(engine, _hashes(engine, prompt)) for prompt in read]
    over, copied = threading.Event(), []

    def reads() -> None:
        while chains and not over.is_set():
            for chain in chains:
                copied.append(manager.follow(peer, chain, seconds=0).wait(60).copied)

    reader = threading.Thread(target=reads)
    reader.start()
    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    asked.add_request("timed", {"prompt_token_ids": [3, 4, 5]}, greedy)
    times, before = [], time.monotonic()
    while asked.has_unfinished_requests():
        asked.step()
        times.append(time.monotonic() - before)
        before = time.monotonic()
    over.set()
    reader.join()
    return {"times": times, "blocks": sum(copied)}


class _Recorder:
    """A manager that notes with which hints it is called."""

    def __init__(self, manager):
        self._manager = manager
        self.noted = {"lease": [], "save_from": [], "finished": []}

    def __getattr__(self, name):
        call = getattr(self._manager, name)
        if name not in self.noted:
            return call

        def noted(*args, **kwargs):
            self.noted[name].append(kwargs.get("hints", kwargs.get("for_good")))
            return call(*args, **kwargs)

        return noted


def record_hints(engine) -> None:
    scheduler = _connector(engine)._scheduler
    scheduler.manager = _Recorder(scheduler.manager)


def recorded_hints(engine, expected: dict) -> dict:
    """Whether each call was given these hints; of ends, whether they were for good."""
    from kvbm_rs import Hints

    noted = _connector(engine)._scheduler.manager.noted
    return {name: sorted({given in (Hints(**expected), True) for given in calls}) for name, calls in noted.items()}


def soak(engine, requests: int, seed: int) -> dict:
    """Asks for prompts, some together, some again, some longer, and takes one of four back at any time.

    Returns memory of this process in bytes as it went on, at rest: at the start, after each eighth of the requests. Also of an
    engine without a connector, which tells of nothing that is left.
    """
    import random

    from vllm import SamplingParams

    from engine import prompt

    draw = random.Random(seed)
    asked = engine.llm.llm_engine
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    memory, aborted, made = [], 0, 0
    while made < requests:
        names = {}
        for _ in range(draw.randint(1, 5)):
            number, blocks = draw.randrange(60), draw.randint(0, 8)
            wanted = prompt(number, 32 * blocks + draw.randint(1, 31))
            name = asked.add_request(f"soak {made}", {"prompt_token_ids": wanted}, greedy)
            names[name or f"soak {made}"] = draw.randint(0, 6) if draw.random() < 0.25 else None
            made += 1
        steps = 0
        while asked.has_unfinished_requests():
            now = [name for name, at in names.items() if at == steps]
            asked.abort_request(now, internal=True)
            aborted += len(now)
            asked.step()
            steps += 1
        if len(memory) <= 8 * made // requests:
            engine.settle()
            memory.append(_memory())
    has_connector = asked.vllm_config.kv_transfer_config is not None
    return {"memory": memory, "aborted": aborted, "left": left(engine) if has_connector else None}


def _memory() -> int:
    """Resident bytes of this process, as far as they are its own: shared ones are files and tiers."""
    import ctypes
    import gc
    import resource

    gc.collect()
    # What was freed goes back to the system.
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as counts:
        _, resident, shared = [int(count) for count in counts.read().split()[:3]]
    return (resident - shared) * resource.getpagesize()


def groups(engine) -> list[dict]:
    """The cache groups that the connector keeps, that of full attention first."""
    return [{"index": group.index, "window": group.window} for group in _connector(engine)._scheduler._config.groups]


def saved_by_group(engine) -> dict:
    """Blocks that came to the host tier from the engine, by cache group."""
    samples = {name: values for name, _, _, values in _connector(engine)._scheduler.manager.samples()}
    saved = samples["kvbm_transfer_blocks_total"]
    return {labels["group"]: int(value) for labels, value in saved if labels["from"] == "device"}


def watch_layers(engine) -> None:
    """From here on each worker notes each layer that is waited for, and how many layers were there before and after."""
    engine.llm.collective_rpc(_watch_layers)


def _watch_layers(_) -> None:
    worker = _worker()
    worker.noted_waits = []
    wait = type(worker).wait_for_layer

    def arrived(load) -> int:
        layers, there = len(worker._layers), getattr(load, "_slice", None) or load._load
        if there is None:
            return 0
        return next(number for number in range(layers, -1, -1) if there.wait_layers(number, 0.0))

    def noted(name):
        before = [arrived(load) for load in worker._layered]
        wait(worker, name)
        for load, there in zip(worker._layered, before):
            worker.noted_waits.append({"layer": worker._layers[name], "before": there, "after": arrived(load)})

    worker.wait_for_layer = noted


def begin_loads_late(engine) -> None:
    """From here on a load layer by layer begins when its first layer is waited for, and not before."""
    from kvbm_rs.vllm.connector.worker import LayeredLoad

    begin, wait = LayeredLoad.begin, LayeredLoad.wait_layers

    def note(load, *given):
        load.begins = given

    def begin_and_wait(load, layers):
        if load._load is None:
            begin(load, *load.begins)
        wait(load, layers)

    LayeredLoad.begin, LayeredLoad.wait_layers = note, begin_and_wait


def layer_waits(engine) -> list[dict]:
    """Those of the first worker."""
    return layer_waits_by_worker(engine)[0]


def layer_waits_by_worker(engine) -> list[list[dict]]:
    return engine.llm.collective_rpc(_layer_waits)


def _layer_waits(_) -> list[dict]:
    return _worker().noted_waits


def abort_first_of_two(engine, prompt: list[int], steps: int) -> list[int]:
    """Asks twice for `prompt`, takes `steps` steps, and takes the first one back. Returns what the second one says."""
    first, _ = begin(engine, [prompt, prompt], steps)
    engine.llm.llm_engine.abort_request([first], internal=True)
    (said,) = finish(engine)
    return said


def sent(engine) -> int:
    """Blocks that went to peers over connections."""
    samples = {name: values for name, *_, values in _connector(engine)._scheduler.manager.samples()}
    return int(sum(value for of, value in samples.get("kvbm_peer_blocks_total", ()) if of["direction"] == "sent"))


def saved_in_layers(engine) -> int:
    """Blocks that were saved layer by layer."""
    samples = {name: values for name, *_, values in _connector(engine)._scheduler.manager.samples()}
    return int(sum(value for _, value in samples["kvbm_layered_blocks_total"]))


def hold_layers(engine, blocks: int) -> None:
    """From here on a step that saves layer by layer does not end before that many more blocks have gone to peers."""
    import time

    worker, due = _worker(), sent(engine) + blocks

    def finish_held():
        until = time.monotonic() + 60.0
        while worker._saves and sent(engine) < due:
            assert time.monotonic() < until
            time.sleep(0.001)
        type(worker).finish_saves(worker)

    worker.finish_saves = finish_held


def hang_between_layers(engine, flag: str) -> None:
    """From here on a step that saves layer by layer hangs after the second one, and then there is a file."""
    import time
    from pathlib import Path

    worker = _worker()

    def hang(name):
        type(worker).save_layer(worker, name)
        if worker._saves and worker._layers[name] == 2:
            Path(flag).touch()
            time.sleep(600.0)

    worker.save_layer = hang
