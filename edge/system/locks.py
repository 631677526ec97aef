"""Locks of open files between processes. The system frees a dead process's.

A lock belongs to the descriptor and ends when it is closed. It keeps nobody from reading or writing
the file: only those that ask for the lock wait.
"""

import ctypes
import errno
import os
import sys

if sys.platform == "win32":
    import msvcrt
    from ctypes import wintypes

    _FAIL_AT_ONCE, _EXCLUSIVE = 1, 2
    _ERROR_LOCK_VIOLATION, _ERROR_IO_PENDING = 33, 997

    class _Overlapped(ctypes.Structure):
        """OVERLAPPED of Windows: where the locked bytes begin.

        Locked bytes cannot be read by others, so the lock is on one byte beyond any file's end.
        """

        _fields_ = (
            ("internal", ctypes.c_size_t),
            ("internal_high", ctypes.c_size_t),
            ("offset", wintypes.DWORD),
            ("offset_high", wintypes.DWORD),
            ("event", wintypes.HANDLE),
        )

else:
    import fcntl


def lock(descriptor: int, *, is_shared: bool = False, waits: bool = False) -> None:
    """Lock an open file. Raises BlockingIOError if another process holds it and `waits` is False,
    OSError where the file system has no locks."""
    if sys.platform == "win32":
        kernel = ctypes.WinDLL("kernel32", use_last_error=True)
        flags = (0 if is_shared else _EXCLUSIVE) | (0 if waits else _FAIL_AT_ONCE)
        where = _Overlapped(offset=0, offset_high=0x7FFF_FFFF)
        handle = wintypes.HANDLE(msvcrt.get_osfhandle(descriptor))
        if not kernel.LockFileEx(handle, flags, 0, 1, 0, ctypes.byref(where)):
            code = ctypes.get_last_error()
            if code in (_ERROR_LOCK_VIOLATION, _ERROR_IO_PENDING):
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            raise ctypes.WinError(code)
    else:
        kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
        fcntl.flock(descriptor, kind if waits else kind | fcntl.LOCK_NB)


def lock_now(descriptor: int, *, is_shared: bool = False) -> bool:
    """Lock an open file. Returns False if another process holds it. Raises OSError otherwise."""
    try:
        lock(descriptor, is_shared=is_shared)
    except BlockingIOError:
        return False
    return True
