"""`KvbmConnector` over an object store of the S3 protocol, moto's: one that hangs costs time, and nothing else."""

import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from connectors import LENGTH, SERVED, connector, is_at_rest, probe
from engine import Engine, prompt

BUCKET = "kvbm-test"
# A store that answers nothing is given up after 30 s.
PATIENCE = 90.0


class Server:
    def __init__(self, command: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{port}"
        arguments = [command, "-H", "127.0.0.1", "-p", str(port)]
        self.process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def make_bucket(self, until: float) -> None:
        request = urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT")
        while True:
            try:
                urllib.request.urlopen(request).close()
                return
            except OSError:
                assert time.monotonic() < until, "moto_server does not listen"
                time.sleep(0.1)

    def hang(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server():
    command = shutil.which("moto_server", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("no server of the S3 protocol: pip install 'moto[server]'")
    server = Server(command)
    try:
        server.make_bucket(time.monotonic() + 60)
        yield server
    finally:
        server.end()


@pytest.mark.slow
def test_a_store_that_hangs_costs_time_and_nothing_else(model, said, server):
    objects = {
        "object.url": f"s3://{BUCKET}/prefix",
        "object.endpoint": server.endpoint,
        "object.access_key": "key",
        "object.secret_key": "secret",
        "flush.interval_ms": 10,
    }
    with Engine(model, **connector(objects)) as engine:
        for number in range(4):
            engine.generate(prompt(number, LENGTH))
        assert probe(engine, "drain")
        assert engine.reset()
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[0]], SERVED)
        assert engine.reset()

        server.hang()
        # One that the store has; beside it one that it has not, which does not wait; and one that comes to it meanwhile.
        together = engine.generate(prompt(1, LENGTH), prompt(5, LENGTH))
        assert together.said == [said[1], said[5]]
        assert together.scheduled == 2 * (LENGTH + 7)
        assert together.seconds < PATIENCE
        assert engine.generate(prompt(6, LENGTH)).said == [said[6]]
        assert is_at_rest(engine)

        server.go_on()
        # A request tries with one block whether the store is well again, and computes the others; then all is as before.
        until = time.monotonic() + PATIENCE
        while engine.reset() and engine.generate(prompt(3, LENGTH)).scheduled != SERVED:
            assert time.monotonic() < until, "it does not heal"
        for number in (0, 2):
            warm = engine.generate(prompt(number, LENGTH))
            assert (warm.said, warm.scheduled) == ([said[number]], SERVED)
        # What failed then is kept again.
        engine.generate(prompt(1, LENGTH))
        assert probe(engine, "drain") and engine.reset()
        assert engine.generate(prompt(1, LENGTH)).scheduled == SERVED
        assert is_at_rest(engine)
