"""A link between two network namespaces, by which packets come late, get lost, or do not come at all.

    link.py PID PID      joins the namespaces of two processes: 10.77.0.1 and 10.77.0.2

It says `ready` once it is there. Each line that it reads, `MS SHARE`, says how long packets take from now on, and which
share of them is lost: with 1 the link is cut, and neither side is told. It answers `ok`. It takes root, and a tun device for
each side. (`tc netem` does as much, where the kernel has it.)
"""

import collections
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MOST_WAITING = 10_000


def end_of_link(pid, own, other):
    """A tun device in the namespace of a process."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    made = fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"kvbm%d", IFF_TUN | IFF_NO_PI))
    name = made[:16].rstrip(b"\0").decode()
    there = ["nsenter", f"--net=/proc/{pid}/ns/net"]
    for command in (
        ["ip", "link", "set", name, "netns", pid],
        [*there, "ip", "address", "add", own, "peer", other, "dev", name],
        [*there, "ip", "link", "set", name, "up"],
    ):
        subprocess.run(command, check=True)
    return device


def carry(ends):
    chance = random.Random(7)
    delay, lost = 0.0, 0.0
    under_way = collections.deque()
    while True:
        pause = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        readable, _, _ = select.select([sys.stdin, *ends], [], [], pause)
        now = time.monotonic()
        if sys.stdin in readable:
            # Who sent it waits for the answer: there is no other behind it.
            line = sys.stdin.readline().split()
            if not line:
                return
            delay, lost = float(line[0]) / 1000, float(line[1])
            under_way.clear()
            print("@ ok", flush=True)
        for source in ends:
            if source in readable:
                packet = os.read(source, 65536)
                if chance.random() >= lost and len(under_way) < MOST_WAITING:
                    under_way.append((now + delay, ends[source], packet))
        while under_way and under_way[0][0] <= now:
            _, target, packet = under_way.popleft()
            try:
                os.write(target, packet)
            except OSError:
                pass  # Its process has ended, or its queue is full.


first, second = sys.argv[1:]
one = end_of_link(first, "10.77.0.1", "10.77.0.2")
two = end_of_link(second, "10.77.0.2", "10.77.0.1")
print("@ ready", flush=True)
carry({one: two, two: one})
