"""Processes of `edge` that are forked from one which has imported it already.

To start Python and to import what a daemon imports takes 0.5 s of a core, and tests start daemons
and command lines by the hundred. So each worker keeps one process that has done so, and whoever
starts `python -m edge` through :mod:`subprocess` gets a copy of it: with an id, arguments, streams,
an environment and a parent as any other process has, and with the same `edge.__main__` to run.

What a start itself does is put to the test elsewhere, by processes that are begun anew: those of
the README, and wherever a test has the fixture `begun_anew`. A program of `known_rates` starts
daemons of its own: those are forked from a copy of it as it was when it began.

Modules of the tests that compute in a process of their own (`run_module`) are forked from a copy of
the worker as it was before its first test: all that the tests import is there already.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import io
import itertools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from edge.cli.main import COMMANDS
from edge.system.heap import with_malloc_settings
from tests.support import passing_time, quick_interpreter

ROOT = Path(__file__).parents[2]

_MOST_BYTES = 128 << 10
"""Of a message: arguments and an environment."""

_READ_AT_THE_START = ("PYTHON", "LD_", "LC_", "LANG", "OMP_", "OPENBLAS_", "GLIBC_TUNABLES")
"""Beginnings of variables that Python, libraries and the C library look at once."""

_INTERPRETED = "TRITON_INTERPRET"
"""Triton looks at this one when it is imported."""

_PR_SET_CHILD_SUBREAPER = 36

_CLONE_NEWNET = 0x40000000

_IN_NETWORK = "--net="
"""Of `nsenter`: the file of a network namespace."""

_RATES = "tests.support.known_rates"
"""`edge` itself, whose peers know their speed."""

_PROGRAMS = ("edge", _RATES)

MODULE = "module of tests"
"""What is forked from a copy of this process, in place of those that are started for it."""

_STRICTLY = ["-W", "error"]

_PEER = (
    # As much as it will have when it measures its own memory: of ONNX Runtime it has threads.
    "edge.cli.commands.peer",
    "edge.membership.current",
    "cryptography.hazmat.backends.openssl.backend",
    "edge.backends.ort.backend",  # it starts no thread until it computes
    "edge.models.llama",
    "encodings.idna",
    "numpy.ma",
    "numpy.random",
)

_COMMANDS = (
    *(f"edge.cli.commands.{name}" for name in COMMANDS),
    "_strptime",
    "edge.models.llama",
    "encodings.idna",
    "prompt_toolkit.patch_stdout",
    "prompt_toolkit.shortcuts",
    "rich._emoji_codes",
    "rich.progress",
)  # not `huggingface_hub`, which reads the environment when it is imported

IMPORTED: Mapping[str, Sequence[str]] = {
    "peer": _PEER,
    "GPU peer": (*_PEER, "edge.backends.triton.loading", "edge.backends.triton.nccl"),
    "another command": _COMMANDS,
    "command with peers": (*_PEER, *_COMMANDS, "edge.planning.cluster_profile"),
}
"""By what is started; a GPU peer is one whose kernels are interpreted."""

_ORDINARY = {
    "preexec_fn": None,
    "close_fds": True,
    "pass_fds": (),
    "shell": False,
    "restore_signals": True,
    "gid": None,
    "gids": None,
    "uid": None,
    "umask": -1,
    "process_group": -1,
}


_ADOPTING = threading.Lock()
"""Whose child an orphan becomes is a setting of the whole process: one at a time changes it."""


class Original:
    """A process that others are forked from; started when the first is asked for."""

    def __init__(self, kind: str, on_start: Callable[[int], None]) -> None:
        """`kind` is one of `IMPORTED`; `on_start` is told its process id."""
        self._kind, self._on_start = kind, on_start
        # A daemon that has not got these begins itself again, as it does everywhere.
        self._environment = (
            dict(os.environ) if kind == "another command" else with_malloc_settings(os.environ)
        )
        self._cores = os.sched_getaffinity(0)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._copy: int | None = None

    @classmethod
    def of_this_process(cls, on_start: Callable[[int], None]) -> Original:
        """A copy of this process as it is now, from which modules of tests are forked."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with warnings.catch_warnings():
            # What other threads may hold, such as those of pytest-xdist, no copy asks for.
            warnings.simplefilter("ignore", DeprecationWarning)
            copy = os.fork()
        if not copy:
            ours.close()
            _serve_modules(theirs)
        theirs.close()
        on_start(copy)
        original = cls.begun(MODULE, ours, os.environ)
        original._copy = copy
        return original

    @classmethod
    def begun(cls, kind: str, control: socket.socket, environment: Mapping[str, str]) -> Original:
        """One that runs already, and was begun with that environment."""
        original = cls(kind, on_start=lambda _id: None)
        original._control, original._environment = control, dict(environment)
        return original

    def is_like(self, environment: Mapping[str, str]) -> bool:
        """Whether a process with that environment, begun anew, would have been the same."""
        if self._kind == "command with peers":  # itself it is none the worse for those of its peers
            environment = with_malloc_settings(environment)
        own, wanted = map(_read_at_the_start, (self._environment, environment))
        return os.sched_getaffinity(0) == self._cores and own == wanted

    def fork(self, asked: Mapping[str, Any], streams: Sequence[int]) -> int:
        """The id of a child of this process which is what was asked for."""
        with self._lock:
            if self._control is None:
                self._control = self._start()
            with _ADOPTING, _orphans_are_ours():
                socket.send_fds(self._control, [json.dumps(asked).encode()], streams)
                return int(self._control.recv(32))

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, self._kind, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=self._environment,
                cwd=ROOT,
            )
        self._on_start(self._process.pid)
        return ours

    def close(self) -> None:
        if self._process is not None and self._control is not None:
            self._control.close()
            self._process.wait()
        if self._copy is not None and self._control is not None:
            self._control.close()
            os.waitpid(self._copy, 0)


class ForkingPopen(subprocess.Popen[Any]):
    """`subprocess.Popen`, which forks what is a usual `python -m edge`, also in another network."""

    originals: ClassVar[Mapping[str, Original]]

    def _execute_child(self, *given: Any) -> None:
        usual: Any = super()
        names = inspect.signature(usual._execute_child).parameters
        named = dict(zip(names, given, strict=True))
        command, env = named["args"], named["env"]
        environment = dict(os.environ if env is None else env)
        words = [] if isinstance(command, str | bytes | os.PathLike) else list(command)
        network = None
        if words[:1] == ["nsenter"] and words[1].startswith(_IN_NETWORK):
            network, words = words[1].removeprefix(_IN_NETWORK), words[2:]
        is_strict = words[1:3] == _STRICTLY
        if is_strict:
            del words[1:3]
        if words[1:2] == ["-P"]:  # it has no folder of this moment in its path
            del words[1]
        kind = _kind_of(words, environment)
        original = self.originals.get(kind)
        if (
            original is None
            or (is_strict and kind != MODULE)
            or words[:2] != [sys.executable, "-m"]
            or (kind != MODULE and words[2:3] not in [[program] for program in _PROGRAMS])
            or any(named.get(name, value) != value for name, value in _ORDINARY.items())
            or not original.is_like(environment)
        ):
            usual._execute_child(*given)
            return
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        pipes = [named[name] for name in ends]
        asked = {
            "command": [os.fsdecode(each) for each in words],
            "environment": environment,
            "cwd": os.fspath(named["cwd"] or Path.cwd()),
            "own_session": named["start_new_session"],
            "network": network,
            "is_strict": is_strict,
        }
        theirs = [named[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [number if end == -1 else end for number, end in enumerate(theirs)]
        self.pid = original.fork(asked, streams)
        self._child_created = True
        usual._close_pipe_fds(*pipes)


def _kind_of(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """One of `IMPORTED`."""
    if words[2:3] == [_RATES]:
        return "command with peers"
    if words[2:3] and words[2].startswith("tests.") and environment.get(_INTERPRETED) != "0":
        return MODULE
    if words[3:4] != ["peer"]:
        return "another command"
    options = itertools.pairwise(words)
    is_gpu = ("--backend", "triton") in options and environment.get(_INTERPRETED) == "1"
    return "GPU peer" if is_gpu else "peer"


def _read_at_the_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Where our modules are makes no difference: they are imported already."""
    found = {
        name: value for name, value in environment.items() if name.startswith(_READ_AT_THE_START)
    }
    folders = found.pop("PYTHONPATH", "").split(os.pathsep)
    others = [folder for folder in folders if folder not in ("", str(ROOT))]
    return {**found, "PYTHONPATH": os.pathsep.join(others)}


@contextlib.contextmanager
def _orphans_are_ours() -> Iterator[None]:
    """A process whose parent ends becomes a child of this one, not of the system's first."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork whenever asked: in a process that was forked what it is, None once nobody asks."""
    while True:
        message, streams, _flags, _address = socket.recv_fds(control, _MOST_BYTES, 3)
        if not message:
            return None
        from_child, to_parent = os.pipe()
        between = os.fork()
        if not between:
            # Its child is an orphan at once, and so becomes a child of whoever asked.
            if child := os.fork():
                os.write(to_parent, str(child).encode())
                os._exit(0)
            for each in (control.detach(), from_child, to_parent):
                os.close(each)
            asked: dict[str, Any] = json.loads(message)
            _become(asked, streams)
            return asked
        os.close(to_parent)
        child_id = os.read(from_child, 32)
        for each in (from_child, *streams):
            os.close(each)
        os.waitpid(between, 0)
        control.send(child_id)


def _become(asked: Mapping[str, Any], streams: Sequence[int]) -> None:
    """What Python would have made of this process had it been started with that."""
    if asked["own_session"]:
        os.setsid()
    if asked["network"] is not None:
        _enter_network(asked["network"])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if asked["own_session"] and os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # whose Ctrl-C, and end, is for this process
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    passing_time.set_limits(asked["environment"])
    tempfile.tempdir = None  # libraries that have been imported may have asked where it is
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.orig_argv = asked["command"]
    sys.argv = ["-m", *asked["command"][3:]]
    sys.path[0] = asked["cwd"]
    at_once = "PYTHONUNBUFFERED" in asked["environment"]
    sys.stdin = open(0, encoding=sys.stdin.encoding, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            open(number, "wb", buffering=0 if at_once else -1, closefd=False),  # noqa: SIM115
            encoding=usual.encoding,
            errors=usual.errors,
            line_buffering=number == 2 or os.isatty(number),
            write_through=at_once,
        )
        for number, usual in ((1, sys.stdout), (2, sys.stderr))
    )


def _enter_network(file: str) -> None:
    with Path(file).open("rb") as network:
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def _nothing_checked(*_: object, **__: object) -> None:
    """In place of the self check of kernels."""


def _copied(asked: dict[str, Any], environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Leave a copy of this process, of which daemons are forked that it starts. What the caller
    is: this process, a daemon, or None once the copy is not needed any more."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        ForkingPopen.originals = {"peer": Original.begun("peer", ours, environment)}
        subprocess.Popen = ForkingPopen  # type: ignore[misc]
        return asked
    ours.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _say_nothing()
    return _serve(theirs)


def _serve_modules(control: socket.socket) -> NoReturn:
    """As a copy of a process with tests: fork modules until nobody asks. Nothing that the tests
    would do at their end is done here."""
    code = 1
    try:
        atexit._clear()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _say_nothing()
        asked = _serve(control)
        if asked is None:
            os._exit(0)
        warnings.resetwarnings()
        if asked["is_strict"]:
            warnings.simplefilter("error")
        # That of pytest finds test modules first, and cannot run one.
        sys.meta_path[:] = [each for each in sys.meta_path if not hasattr(each, "_rewritten_names")]
        sys.modules.pop(asked["command"][2], None)
        code = _run(asked["command"][2])
    except BaseException:
        traceback.print_exc()
    finally:
        _end(code)
        os._exit(1)


def _say_nothing() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def _run(program: str) -> int:
    """Its code; raises where Python would tell more than a number."""
    try:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        raise
    return 0


def _end(code: int) -> None:
    """As Python ends, but nothing that was imported is taken apart, page by page: for a short
    command that is half of its time. Returns where output could not be written: Python tells."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    is_gpu = sys.argv[1] == "GPU peer"
    if is_gpu:
        os.environ[_INTERPRETED] = "1"
        quick_interpreter.install()
    for module in IMPORTED[sys.argv[1]]:
        importlib.import_module(module)
    if is_gpu:  # as `without_self_check` of `triton_shards` says: what they compute is compared
        from edge.backends.triton import loading

        loading.run_self_check = _nothing_checked  # type: ignore[attr-defined]
    # More shards compute in the tests than there are cores: who asks again and again for what a
    # neighbour has not sent yet takes the time that the neighbour would need.
    importlib.import_module("edge.transport.tcp_link").POLL_S = 0.0  # type: ignore[attr-defined]
    passing_time.be_patient(imports=False)
    gc.freeze()
    environment = dict(os.environ)
    asked = _serve(socket.socket(fileno=int(sys.argv[2])))
    if asked is not None and asked["command"][2] == _RATES:
        asked = _copied(asked, environment)
    if asked is not None:
        _end(_run(asked["command"][2]))
