"""What tests of the connector look at inside the engine's process."""


def _connector(engine):
    return engine.core.scheduler.connector


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
