"""For how long nobody has used this device's keyboard, mouse or terminals."""

import contextlib
import ctypes
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil

_ASKED_FOR_S = 5.0

if sys.platform == "win32":

    class _LastInput(ctypes.Structure):
        """LASTINPUTINFO of Windows: milliseconds since the start at the last key or movement."""

        _fields_ = (("size", ctypes.c_uint), ("at_ms", ctypes.c_uint))


def unused_s() -> float | None:
    """Seconds since a key was pressed or the mouse was moved; None: the system does not tell."""
    if sys.platform == "win32":
        last = _LastInput(size=ctypes.sizeof(_LastInput))
        if not ctypes.WinDLL("user32").GetLastInputInfo(ctypes.byref(last)):
            return None
        now_ms = ctypes.WinDLL("kernel32").GetTickCount()
        return float((now_ms - last.at_ms) % (1 << 32)) / 1000
    if sys.platform == "darwin":
        found = re.search(r'"HIDIdleTime" = (\d+)', _told("ioreg", "-c", "IOHIDSystem"))
        return None if found is None else int(found[1]) / 1e9
    told = _told("loginctl", "show-session", "-p", "IdleHint", "-p", "IdleSinceHint")
    values = dict(line.partition("=")[::2] for line in told.splitlines())
    if values.get("IdleHint") == "no":
        return 0.0
    if values.get("IdleHint") == "yes" and values.get("IdleSinceHint", "").isdecimal():
        return max(0.0, time.time() - int(values["IdleSinceHint"]) / 1e6)
    return _unused_terminals_s()


def _unused_terminals_s() -> float | None:
    """The same of the terminals at which users are, where there is no manager of sessions."""
    ages = []
    for user in psutil.users():
        with contextlib.suppress(OSError):
            ages.append(time.time() - Path("/dev", user.terminal or "").stat().st_atime)
    return max(0.0, min(ages)) if ages else None


def _told(*command: str) -> str:
    """The output of a program of the system; empty if there is none, or it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command,
            env={**os.environ, "LC_ALL": "C"},
            capture_output=True,
            text=True,
            timeout=_ASKED_FOR_S,
            check=False,
        )
        return done.stdout if done.returncode == 0 else ""
    return ""
