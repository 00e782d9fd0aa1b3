"""What tests of the connector look at inside the engine's process."""


def _connector(engine):
    """Ours, also where it is one of several."""
    connector = engine.core.scheduler.connector
    parts = getattr(connector, "sub_connectors", [connector])
    return next(part for part in parts if type(part).__name__ == "KvbmConnector")


def left(engine) -> dict:
    """What is kept of requests, and blocks of the engine's that are in use: the null block always is."""
    scheduler = _connector(engine)._scheduler
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    return {
        "requests": len(scheduler._requests),
        "loading": len(scheduler._loading),
        "saving": len(scheduler._saving),
        "ending": len(scheduler._ending),
        "used_blocks": pool.num_gpu_blocks - pool.get_num_free_blocks(),
    }


def drain(engine) -> bool:
    return _connector(engine)._scheduler.manager.drain(30.0)


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


def spoil_next_load(engine) -> None:
    """Overwrites what the next load brings, once it has arrived."""
    worker = _worker()
    begin = worker.begin

    def spoiled(told):
        if told.loaded:
            for tensor in worker._tensors:
                tensor.mul_(-3)
        begin(told)

    worker.begin = spoiled


def _worker():
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker


def abort_after(engine, prompt: list[int], steps: int) -> None:
    """Asks for `prompt`, lets the engine take so many steps, and takes it back."""
    from vllm import SamplingParams

    asked = engine.llm.llm_engine
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    name = asked.add_request("aborted", {"prompt_token_ids": prompt}, greedy)
    for _ in range(steps):
        asked.step()
    asked.abort_request([name or "aborted"], internal=name is not None)
    while asked.has_unfinished_requests():
        asked.step()


def load_times(engine, prompt: list[int], rounds: int) -> dict:
    """Seconds that the blocks of a prompt take from the host tier to slots that nobody uses, and as many bytes by memcpy, with as
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
    tensors = _worker()._tensors
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
            lease = scheduler.manager.lease(Chain(hashes))
            assert lease.by_tier == {"host": blocks}, lease.by_tier
            began = time.perf_counter()
            end = scheduler.manager.load_into(lease, 0, slots).wait(10.0)
            load.append(time.perf_counter() - began)
            assert end.arrived == blocks
            began = time.perf_counter()
            list(threads.map(copy, halves))
            plain.append(time.perf_counter() - began)
    return {"load": load, "memcpy": plain, "ratios": [one / other for one, other in zip(load, plain)]}


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
        engine.generate([prompt], 1, None)
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


def occupancy(engine) -> dict:
    """Slots of each tier: in all, and with a block."""
    return _connector(engine)._scheduler.manager.occupancy()


def sleep(engine, prompts: list[list[int]] = (), steps: int = 0) -> None:
    """Puts it to sleep after so many steps of `prompts`, which it takes back, and wakes it."""
    begin(engine, prompts, steps)
    engine.llm.sleep(level=1)
    engine.llm.wake_up()
    finish(engine)


def exchange_weights(engine, prompt: list[int]) -> None:
    """Gives the model other weights while it computes `prompt`; the second call gives it the first ones again."""
    begin(engine, [prompt], steps=2)
    engine.llm.apply_model(_exchange)
    assert engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    finish(engine)


def _exchange(model) -> None:
    model.model.embed_tokens.weight.data.neg_()


def begin(engine, prompts: list[list[int]], steps: int) -> None:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    asked = engine.llm.llm_engine
    for number, prompt in enumerate(prompts):
        asked.add_request(f"begun {number}", {"prompt_token_ids": prompt}, greedy)
    for _ in range(steps):
        asked.step()


def finish(engine) -> None:
    """Steps until every request has ended."""
    asked = engine.llm.llm_engine
    while asked.has_unfinished_requests():
        asked.step()
