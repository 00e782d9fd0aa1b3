"""`kvbm top` in a terminal: it draws again and again, says that the process answers no more, and leaves the terminal as it was."""

import contextlib
import os
import pty
import select
import subprocess
import time

import pytest

from documents import KVBM
from stub import Stub

pytestmark = pytest.mark.skipif(not KVBM.exists(), reason=f"{KVBM} is not built")


class Terminal:
    """What a program draws on a terminal of its own."""

    def __init__(self, *command: str) -> None:
        self.ours, theirs = pty.openpty()
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True)
        os.close(theirs)
        self.drawn = ""

    def shows(self, text: str, seconds: float = 15) -> bool:
        """Whether it draws this from here on."""
        self.drawn, end = "", time.monotonic() + seconds
        while time.monotonic() < end:
            if select.select([self.ours], [], [], 0.2)[0]:
                try:
                    self.drawn += os.read(self.ours, 1 << 16).decode(errors="replace")
                except OSError:
                    # The other end is closed.
                    return text in self.drawn
            if text in self.drawn:
                return True
        return False

    def press(self, key: str) -> None:
        os.write(self.ours, key.encode())

    def hang_up(self) -> None:
        if self.ours >= 0:
            os.close(self.ours)
            self.ours = -1

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.hang_up()


@pytest.mark.parametrize("key", ["q", "\x03"], ids=["q", "ctrl-c"])
def test_it_draws_until_a_key_ends_it(key):
    with Stub() as stub, contextlib.closing(Terminal(str(KVBM), "top", "--url", stub.url)) as terminal:
        assert terminal.shows("host>disk"), terminal.drawn
        assert "\x1b[?1049h" in terminal.drawn and "hit rate" in terminal.drawn
        assert terminal.shows("hit rate"), "it draws again"
        terminal.press(key)
        assert terminal.shows("\x1b[?1049l"), "the terminal is as it was"
        assert terminal.process.wait(10) == 0


def test_it_waits_for_a_process_that_is_gone():
    with Stub() as stub:
        terminal = Terminal(str(KVBM), "top", "--url", stub.url)
        shows = terminal.shows("host>disk")
    with contextlib.closing(terminal):
        assert shows, terminal.drawn
        assert terminal.shows("does not answer"), terminal.drawn
        assert terminal.process.poll() is None
        terminal.press("q")
        assert terminal.process.wait(10) == 0


def test_it_ends_with_its_terminal():
    with Stub() as stub, contextlib.closing(Terminal(str(KVBM), "top", "--url", stub.url)) as terminal:
        assert terminal.shows("host>disk"), terminal.drawn
        terminal.hang_up()
        # Else it would look for keys for ever, as fast as it can.
        terminal.process.wait(10)
