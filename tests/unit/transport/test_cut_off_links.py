"""A link whose device cannot be reached any more, in a network that really is cut."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

IN_A_NETWORK_OF_ITS_OWN = ("unshare", "--user", "--map-root-user", "--net")

SCRIPT = """
import fcntl, socket, struct
import numpy as np
from edge.transport import TcpLink
from edge.transport import tcp_link
from tests.support.transport_pairs import in_threads, socket_pair

UP, SET_FLAGS = 1, 0x8914

def switch(flags):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sH14x", b"lo", flags))

tcp_link.DEVICE_GONE_AFTER_S, tcp_link.LOOK_EVERY_S = 1.5, 0.1
switch(UP)
pairs = [[TcpLink(end, "neighbour", 1e6) for end in socket_pair()] for _ in range(3)]
into, large = np.zeros(8, np.uint8), np.zeros(24 << 20, np.uint8)
for first, second in pairs:
    first.send(into)
    second.receive(into)
switch(0)
waiting = [first for first, _ in pairs]
for lost in in_threads([
    lambda: waiting[0].receive(into),
    lambda: waiting[1].send(large),
    lambda: waiting[2].exchange(large, np.zeros_like(into)),
]):
    print(type(lost).__name__, lost)
for pair in pairs:
    for end in pair:
        end.close()
"""


def may_make_networks() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*IN_A_NETWORK_OF_ITS_OWN, "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not may_make_networks(), reason="this system allows no networks of one's own")
@pytest.mark.linux_ways
def test_a_device_that_is_cut_off_is_lost_however_long_a_step_may_take() -> None:
    command = [*IN_A_NETWORK_OF_ITS_OWN, sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert len(told) == 3, told
    for line in told:
        assert line.startswith("PeerLostError lost neighbour: its device was not reached"), told
