"""What the native side has to say comes to Python's logging, and waits for no reader."""

import logging
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvbm_rs import Blocks, Chain, Settings, logs

BLOCK = 4096
WRONG = "a block and its descendants are dropped"


def open_blocks(place: Path) -> Blocks:
    settings = {
        "block_bytes": BLOCK,
        "host.capacity": "64 blocks",
        "disk": {"capacity": "64 blocks", "dirs": [place], "keep": True},
        # What is bad is found by those who ask for it.
        "transfer.scrub_mib_per_second": 0,
    }
    return Blocks(Settings(settings), fingerprint={"model": "m", "weights": "w", "block_tokens": 16})


def chain(number: int) -> Chain:
    return Chain([number.to_bytes(16, "big")])


def leave_corrupt(place: Path, blocks: int) -> None:
    """A disk tier with blocks of which none is what it was."""
    kept = open_blocks(place)
    for number in range(blocks):
        assert kept.put(chain(number), bytes(BLOCK)) == 1
    assert kept.drain(30.0) and kept.close(30.0)
    (slots,) = place.glob("*.blocks")
    with slots.open("r+b") as file:
        for slot in range(slots.stat().st_size // BLOCK):
            file.seek(slot * BLOCK + 100)
            file.write(b"\xff")


def logged(place: Path, program: str) -> list[str]:
    """What a process of its own logs, or prints, that runs `program`: limits are of a process."""
    begin = f"""
        import logging, os, sys, threading
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        logging.basicConfig(level=logging.INFO, format="%(process)d %(levelname)s %(name)s %(filename)s %(message)s", stream=sys.stdout)
        from pathlib import Path
        from kvbm_rs._native import flush_log
        from test_logs import BLOCK, chain, open_blocks
        place = Path({str(place)!r})
        def miss(blocks, number):
            assert blocks.get(chain(number), bytearray(BLOCK)) == 0
    """
    text = textwrap.dedent(begin) + textwrap.dedent(program)
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.splitlines()


def test_an_error_of_the_native_side_is_logged(tmp_path: Path) -> None:
    leave_corrupt(tmp_path, 1)
    lines = logged(tmp_path, "blocks = open_blocks(place); miss(blocks, 0); blocks.close(30.0)")
    (error,) = [line for line in lines if WRONG in line]
    assert f"ERROR kvbm_rs dispatch.rs {WRONG} tier=disk" in error
    assert any("INFO kvbm_rs" in line and "blocks of an earlier process" in line for line in lines)


def test_lines_of_one_place_are_limited_and_others_counted(tmp_path: Path) -> None:
    leave_corrupt(tmp_path, 40)
    lines = logged(
        tmp_path,
        """
        blocks = open_blocks(place)
        for number in range(40):
            miss(blocks, number)
        blocks.close(30.0)
        """,
    )
    errors = [line for line in lines if WRONG in line]
    assert len(errors) == 6, errors
    # The number is told at the end of the process at the latest.
    assert "ERROR" in errors[-1] and "35 more in" in errors[-1]


def test_what_is_said_waits_for_nobody(tmp_path: Path) -> None:
    """A handler that is stuck keeps lines, and nothing else: also loads that have something to say go on."""
    leave_corrupt(tmp_path, 4)
    lines = logged(
        tmp_path,
        """
        stuck, go_on = threading.Event(), threading.Event()
        class Stuck(logging.Handler):
            def emit(self, record):
                stuck.set()
                go_on.wait()
        logging.getLogger("kvbm_rs").addHandler(Stuck())
        blocks = open_blocks(place)
        assert stuck.wait(60)
        for number in range(4):
            miss(blocks, number)
        assert blocks.put(chain(9), bytes(BLOCK)) == 1
        assert blocks.close(30.0)
        print("closed", flush=True)
        go_on.set()
        """,
    )
    # And then all of it is told.
    assert sum(WRONG in line for line in lines[lines.index("closed") :]) == 4


def test_a_child_of_a_fork_has_lines_of_its_own(tmp_path: Path) -> None:
    leave_corrupt(tmp_path, 1)
    lines = logged(
        tmp_path,
        """
        # The parent has had something to say, and has a thread for it.
        open_blocks(place).close(30.0)
        flush_log()
        child = os.fork()
        if child == 0:
            blocks = open_blocks(place)
            miss(blocks, 0)
            blocks.close(30.0)
            flush_log()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print("child", child)
        """,
    )
    (child,) = [line.split()[1] for line in lines if line.startswith("child")]
    assert any(line.startswith(f"{child} ERROR") and WRONG in line for line in lines), lines


def test_a_start_says_what_there_is(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    class Opened:
        def opened(self) -> list[str]:
            return ["host: 8 blocks"]

    monkeypatch.setattr(logs, "_logger", None)
    caplog.set_level(logging.INFO, "someone.kvbm")
    assert logs.logger_below("someone").name == "someone.kvbm"
    logs.announce("It", Opened(), ["this changes nothing"])
    title, *rest = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert title[1].startswith("It of kvbm_rs ")
    assert rest == [("WARNING", "this changes nothing"), ("INFO", "host: 8 blocks")]
