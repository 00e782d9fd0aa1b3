"""An engine in a process of its own, for tests: takes one JSON object a line, returns one.

The first line says how the engine is opened (the arguments of `vllm.LLM`). Everything that vLLM prints goes to standard error.

| line | does |
|---|---|
| `{"generate": [[tokens], …], "tokens": n}` | runs the prompts together; returns what they said and what was scheduled. May have a `salt`, and the directory of an `adapter` |
| `{"reset": {"reset_connector": bool}}` | forgets the engine's own prefix cache |
| `{"settle": {}}` | steps until nothing is under way, also below the engine |
| `{"call": "module:function", "with": {…}}` | calls a function of a test with the engine |
| `{"stop": {"whole": bool}}` | shuts down, and exits: by Python's own end if it is to be whole |

With `VLLM_ENABLE_V1_MULTIPROCESSING=1` the EngineCore is in another process still.
"""

import importlib
import json
import os
import sys
import time


def main() -> None:
    # What is printed by whomever must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    say = lambda answer: print(json.dumps(answer), file=answers, flush=True)
    engine = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if engine is None:
                engine = open_engine(request)
                say({"ready": True})
            elif "stop" in request:
                engine.stop()
                say({})
                if request["stop"]["whole"]:
                    return
                # Python's own end, with all that torch has, takes six seconds of a processor.
                os._exit(0)
            else:
                say(engine.do(request))
        except BaseException as error:  # noqa: BLE001 - the test judges it
            say({"error": f"{type(error).__name__}: {error}"})
            if engine is None:
                raise


def open_engine(arguments: dict) -> "Engine":
    from vllm import LLM

    llm = LLM(**arguments)
    apart = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    return EngineApart(llm) if apart else Engine(llm)


class Engine:
    """`vllm.LLM` with its scheduler in this process, whose work is counted."""

    def __init__(self, llm):
        self.llm = llm
        self.adapters = {}
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduled = 0
        schedule = self.core.scheduler.schedule

        def counted(*args, **kwargs):
            output = schedule(*args, **kwargs)
            self.scheduled += output.total_num_scheduled_tokens
            return output

        self.core.scheduler.schedule = counted

    def do(self, request: dict):
        if "generate" in request:
            return self.generate(request["generate"], request["tokens"], request["salt"], request["adapter"])
        if "reset" in request:
            return {"done": bool(self.llm.reset_prefix_cache(**request["reset"]))}
        if "settle" in request:
            return self.settle()
        module, function = request["call"].split(":")
        return getattr(importlib.import_module(module), function)(self, **request.get("with", {}))

    def generate(
        self, prompts: list[list[int]], tokens: int, salt: str | None = None, adapter: str | None = None
    ) -> dict:
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        salted = {} if salt is None else {"cache_salt": salt}
        prompts = [{"prompt_token_ids": prompt, **salted} for prompt in prompts]
        lora = self.adapter(adapter)
        before, began = self.scheduled, time.perf_counter()
        outputs = self.llm.generate(prompts, greedy, use_tqdm=False, lora_request=lora)
        return {
            "seconds": time.perf_counter() - began,
            "scheduled": self.scheduled - before,
            "cached": [output.num_cached_tokens for output in outputs],
            "said": [list(output.outputs[0].token_ids) for output in outputs],
            "ended": [output.outputs[0].finish_reason for output in outputs],
        }

    def adapter(self, place: str | None):
        from vllm.lora.request import LoRARequest

        if place is None:
            return None
        return LoRARequest(os.path.basename(place), 1 + self.adapters.setdefault(place, len(self.adapters)), place)

    def settle(self, limit: float = 60.0) -> dict:
        """What is stored goes on after the last answer, and is only noticed by steps."""
        began = time.perf_counter()
        while self.core.scheduler.has_requests():
            if time.perf_counter() - began > limit:
                raise TimeoutError(f"still busy after {limit} s")
            # Not of the core alone: what it counted would be lost.
            self.llm.llm_engine.step()
        return {"seconds": time.perf_counter() - began}

    def stop(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


class EngineApart(Engine):
    """`vllm.LLM` with its EngineCore in a process of its own, as servers have it: its work is known from its metrics."""

    def __init__(self, llm):
        self.llm = llm
        self.adapters = {}

    def core_process(self) -> int:
        (process,) = self.llm.llm_engine.engine_core.resources.engine_manager.processes
        return process.pid

    def generate(
        self, prompts: list[list[int]], tokens: int, salt: str | None = None, adapter: str | None = None
    ) -> dict:
        self.scheduled = self._computed()
        answer = super().generate(prompts, tokens, salt, adapter)
        # The first token of an answer is the prompt's.
        generated = sum(len(said) - 1 for said in answer["said"])
        return answer | {"scheduled": self._computed() - self.scheduled + generated}

    def _computed(self) -> int:
        """Tokens of prompts that were not found anywhere."""
        name, label = "vllm:prompt_tokens_by_source", ("source", "local_compute")
        found = (metric for metric in self.llm.get_metrics() if metric.name == name)
        return sum(metric.value for metric in found if label in metric.labels.items())

    def settle(self, limit: float = 60.0) -> dict:
        """Its own process goes on by itself until nothing is left."""
        began = time.perf_counter()
        while not self.llm.reset_prefix_cache():
            if time.perf_counter() - began > limit:
                raise TimeoutError(f"still busy after {limit} s")
            time.sleep(0.01)
        return {"seconds": time.perf_counter() - began}


if __name__ == "__main__":
    main()
