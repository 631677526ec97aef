"""Edge on other systems than this one: modules import there, and one room asks which it is."""

from __future__ import annotations

import ast
import importlib
import json
import mmap  # noqa: F401  these lose what other systems lack
import os  # noqa: F401
import select  # noqa: F401
import signal  # noqa: F401
import socket  # noqa: F401
import sys
import time  # noqa: F401
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

from tests.architecture.test_names import PARTS, REPOSITORY
from tests.support.processes import run_module


def import_as_elsewhere(names: Sequence[str], systems: Iterable[tuple[str, list[str]]]) -> None:
    """In a process of its own, which is of no use afterwards."""
    loaded = []
    for name in names:  # what they need of others is imported as on this system
        try:
            importlib.import_module(name)
            loaded.append(name)
        except ModuleNotFoundError as error:  # faces for GPUs
            if error.name not in ("torch", "triton"):
                raise
    assert len(loaded) > 500, len(loaded)
    sys.modules["msvcrt"] = ModuleType("msvcrt")
    for system, missing in systems:
        for name in [each for each in sys.modules if each.split(".")[0] == "edge"]:
            del sys.modules[name]
        for each in missing:
            owner, _, name = each.partition(".")
            if not name:
                sys.modules[each] = None  # type: ignore[assignment]  # its import fails
            elif hasattr(sys.modules[owner], name):
                delattr(sys.modules[owner], name)
        sys.platform = system
        for name in loaded:
            importlib.import_module(name)


NOT_ON_MACOS = [
    *("os.sched_getaffinity", "os.sched_yield", "os.O_DIRECT", "os.O_TMPFILE", "os.memfd_create"),
    *("os.posix_fadvise", "os.posix_fallocate", "os.POSIX_FADV_DONTNEED", "socket.SO_PEERCRED"),
    *("time.CLOCK_BOOTTIME", "mmap.MADV_HUGEPAGE", "mmap.MADV_NOHUGEPAGE", "socket.TCP_KEEPIDLE"),
]
NOT_ON_WINDOWS = [
    *NOT_ON_MACOS,
    *("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "readline"),
    *("os.O_NOFOLLOW", "os.O_NONBLOCK", "os.O_CLOEXEC", "os.pread", "os.pwrite", "os.preadv"),
    *("os.getuid", "os.geteuid", "os.fchmod", "os.fork", "os.setsid", "os.killpg", "os.uname"),
    *("os.statvfs", "os.fstatvfs", "os.getloadavg", "os.major", "os.minor"),
    *("socket.AF_UNIX", "socket.MSG_DONTWAIT", "socket.TCP_INFO", "select.poll"),
    *("signal.SIGHUP", "signal.SIGKILL", "signal.SIGPROF", "signal.SIGSTOP", "signal.SIGCONT"),
    *("signal.setitimer", "signal.ITIMER_PROF", "signal.pthread_sigmask", "time.tzset"),
    *("time.clock_gettime", "mmap.MAP_PRIVATE", "mmap.MAP_ANONYMOUS", "mmap.MADV_DONTNEED"),
    *("mmap.PROT_READ", "mmap.PROT_WRITE"),
]


def test_every_module_imports_without_what_other_systems_lack(tmp_path: Path) -> None:
    names = [
        ".".join(("edge",) * (top in PARTS) + path.relative_to(REPOSITORY).with_suffix("").parts)
        for top in ("edge", *PARTS)
        for path in sorted((REPOSITORY / top).rglob("*.py"))
        if path.stem not in ("__init__", "__main__") and {"bench", "native"}.isdisjoint(path.parts)
    ]
    systems = [("darwin", NOT_ON_MACOS), ("win32", NOT_ON_WINDOWS)]  # the latter lacks more
    told = tmp_path / "told.json"
    told.write_text(json.dumps([names, systems]))
    run_module(__name__, told)


def asked(path: Path) -> list[str]:
    """Questions for the system in a module, such as sys.platform."""
    found = []
    text = path.read_text(encoding="utf-8")
    if not any(module in text for module in ("sys.", "os.", "platform.")):
        return []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name in ("sys.platform", "os.name", "platform.system", "os.uname"):
                found.append(f"{path}:{node.lineno} {name}")
    return found


def test_one_room_asks_which_system_it_is() -> None:
    modules = [path for top in ("edge", *PARTS) for path in (REPOSITORY / top).rglob("*.py")]
    own = [path for path in modules if path.parent == REPOSITORY / "edge" / "system"]
    others = set(modules) - set(own) - set((REPOSITORY / "demos" / "bench").rglob("*.py"))
    others.discard(REPOSITORY / "demos" / "control_groups.py")  # they are Linux's alone
    assert any(asked(path) for path in own)
    assert [line for path in sorted(others) for line in asked(path)] == []


if __name__ == "__main__":
    import_as_elsewhere(*json.loads(Path(sys.argv[1]).read_text()))
