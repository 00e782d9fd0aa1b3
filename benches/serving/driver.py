"""Sends the turns of conversations to an engine, in its process, and takes the times of their tokens."""

import time
from collections import defaultdict

WARM_UP = range(3, 200)
# What vLLM's own loop sleeps where a step had nothing to compute.
PAUSE = 0.001


def run(engine, turns: list[dict]) -> dict:
    """All turns: each at its second, but not before the one before it in its session was answered."""
    _warm_up(engine)
    clocks = Clocks(engine.core.scheduler)
    cpu, began = time.process_time(), time.perf_counter()
    answers = Conversation(engine.llm.llm_engine, turns).hold()
    engine.settle()
    return {
        "answers": answers,
        "seconds": time.perf_counter() - began,
        "process_cpu_s": time.process_time() - cpu,
        "scheduler_cpu_s": clocks.spent,
        "hits": dict(clocks.hits),
    }


def _warm_up(engine) -> None:
    engine.generate([[*WARM_UP]], 4, None, None)
    engine.settle()
    engine.llm.reset_prefix_cache()


class Clocks:
    """The CPU time of the scheduler's thread in the scheduler, and what a connector says of where hits come from."""

    def __init__(self, scheduler):
        self.spent, self.hits, self._is_inside = 0.0, defaultdict(int), False
        for name in ("add_request", "schedule", "update_from_output", "finish_requests"):
            setattr(scheduler, name, self._timed(getattr(scheduler, name)))
        if scheduler.connector is not None:
            connector = scheduler.connector
            connector.get_external_cache_hit_sources = self._counted(connector.get_external_cache_hit_sources)

    def _timed(self, method):
        def timed(*args, **kwargs):
            # One calls another.
            if self._is_inside:
                return method(*args, **kwargs)
            self._is_inside, began = True, time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.spent += time.thread_time() - began
                self._is_inside = False

        return timed

    def _counted(self, sources):
        def counted(request, tokens):
            found = sources(request, tokens)
            for source, number in found.items():
                self.hits[source.value] += number
            return found

        return counted


class Conversation:
    """The turns that wait, and those under way."""

    def __init__(self, asked, turns: list[dict]):
        self.asked, self.waiting, self.under_way, self.answers = asked, list(turns), {}, []

    def hold(self) -> list[dict]:
        """Returns of each turn how long its first token and all of it took, and what was cached of its prompt."""
        self.began = time.perf_counter()
        ready = {turn["session"]: 0.0 for turn in self.waiting}
        while self.waiting or self.under_way:
            self._send(ready)
            for output in self.asked.step():
                self._take(output, ready)
            if not self.under_way:
                time.sleep(PAUSE)
        return self.answers

    def _now(self) -> float:
        return time.perf_counter() - self.began

    def _send(self, ready: dict[int, float]) -> None:
        from vllm import SamplingParams

        now, busy = self._now(), {turn["session"] for turn in self.under_way.values()}
        for turn in list(self.waiting):
            if turn["at"] > now:
                return
            if turn["session"] in busy:
                continue
            busy.add(turn["session"])
            self.waiting.remove(turn)
            greedy = SamplingParams(temperature=0.0, max_tokens=turn["answer"], ignore_eos=True, detokenize=False)
            name = f"turn-{len(self.waiting)}"
            self.under_way[name] = turn | {"sent": max(turn["at"], ready[turn["session"]])}
            self.asked.add_request(name, {"prompt_token_ids": turn["prompt"]}, greedy)

    def _take(self, output, ready: dict[int, float]) -> None:
        turn, now = self.under_way[output.request_id], self._now()
        if output.outputs[0].token_ids:
            turn.setdefault("first", now - turn["sent"])
        if output.finished:
            del self.under_way[output.request_id]
            ready[turn["session"]] = now
            self.answers.append(
                {
                    "first_s": turn["first"],
                    "total_s": now - turn["sent"],
                    "prompt": len(turn["prompt"]),
                    "cached": output.num_cached_tokens,
                }
            )
