"""Processes that begin with vLLM imported: forks of one that imported it, which is most of what an engine's start takes."""

import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading

# From the start of a template until it can fork.
IMPORT_LIMIT = 300.0


class Fork:
    """A process and its group, as `subprocess.Popen` would have it."""

    def __init__(self, template: "Template", pid: int, ended: int) -> None:
        self.template, self.pid, self.ended = template, pid, ended
        # Known once the process has ended, and its id may be another's.
        self.status: int | None = None
        self.lock = threading.Lock()

    def __del__(self) -> None:
        os.close(self.ended)

    def wait(self, timeout: float | None = None) -> int:
        if not select.select([self.ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a fork", timeout)
        with self.lock:
            if self.status is None:
                self.status = self.template.reap(self.pid)
        return self.status

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        self._signal(os.kill, signal.SIGTERM)

    def kill(self) -> None:
        self._signal(os.killpg, signal.SIGKILL)

    def _signal(self, to, which: int) -> None:
        with self.lock:
            if self.status is None:
                to(self.pid, which)


class Template:
    """A process that has imported vLLM in an environment. It ends when neither this nor a fork is referred to any more."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(IMPORT_LIMIT)
        self.one_at_a_time = threading.Lock()
        self.log = tempfile.TemporaryFile("w+")
        number = theirs.fileno()
        options = {"stdin": subprocess.DEVNULL, "stdout": self.log, "stderr": self.log, "start_new_session": True}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(number)], env=environment, pass_fds=[number], **options
            )

    def fork(self, module: str, arguments: list[str], *streams: int) -> Fork:
        """A fork runs a module as `python -m` does, with these three streams, in a process group of its own."""
        try:
            answer, (ended,) = self._ask({"module": module, "arguments": arguments}, streams)
        except (OSError, ValueError) as error:
            # Else the next one would ask it too.
            _template.cache_clear()
            self.log.seek(0)
            raise RuntimeError(f"vLLM is not imported:\n{self.log.read()[-8000:]}") from error
        return Fork(self, answer["pid"], ended)

    def reap(self, pid: int) -> int:
        """The status of a fork that has ended; -1 if the template has too."""
        try:
            return self._ask({"reap": pid})[0]["status"]
        except (OSError, ValueError):
            return -1

    def _ask(self, request: dict, descriptors: tuple[int, ...] = ()) -> tuple[dict, list[int]]:
        with self.one_at_a_time:
            socket.send_fds(self.socket, [json.dumps(request).encode()], descriptors)
            answer, given, *_ = socket.recv_fds(self.socket, 1 << 16, 1)
        return json.loads(answer), given


@functools.lru_cache(maxsize=4)
def _template(environment: frozenset[tuple[str, str]]) -> Template:
    return Template(dict(environment))


def template_of(environment: dict[str, str]) -> Template:
    """All that an environment says holds, also what is read when modules are imported. The last four are kept."""
    # pytest puts the test's name there, which would make a template for each test.
    return _template(frozenset(item for item in environment.items() if item[0] != "PYTEST_CURRENT_TEST"))


def serve(requests: socket.socket) -> None:
    """Forks whenever it is asked to. Only a fork that has run its module returns."""
    while True:
        message, streams, *_ = socket.recv_fds(requests, 1 << 16, 3)
        if not message:
            # Python's own end takes seconds, beside the next test.
            os._exit(0)
        asked = json.loads(message)
        if "reap" in asked:
            _, status = os.waitpid(asked["reap"], 0)
            requests.send(json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode())
            continue
        pid = os.fork()
        if pid == 0:
            run(asked, streams, requests)
            return
        # The fork does it too: who comes first matters to neither.
        os.setpgid(pid, pid)
        for stream in streams:
            os.close(stream)
        ended = os.pidfd_open(pid)
        socket.send_fds(requests, [json.dumps({"pid": pid}).encode()], [ended])
        os.close(ended)


def run(asked: dict, streams: list[int], requests: socket.socket) -> None:
    requests.close()
    os.setpgid(0, 0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.argv = [asked["module"], *asked["arguments"]]
    runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    # What an engine on a CPU imports when it starts.
    import vllm.entrypoints.llm
    import vllm.entrypoints.openai.api_server
    import vllm.model_executor.models.llama
    import vllm.v1.worker.cpu_worker

    assert threading.active_count() == 1, "a fork has no thread but the one that forks"
    # Else each fork's collector would write to all of it, and copy it.
    gc.freeze()
    serve(requests)


if __name__ == "__main__":
    main()
