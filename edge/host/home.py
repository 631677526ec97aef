"""The home folder of the user of this process, which need not have one: as in a container."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable
from pathlib import Path

from edge.errors import RequestError
from edge.system.processes import user_number


def own_folder(variable: str, usual: Callable[[], str]) -> Path:
    """The folder named by the environment's `variable`, else the `usual` one.

    Raises RequestError for a user without a home folder.
    """
    if chosen := os.environ.get(variable):
        return expanded(chosen)
    return under_home(usual, or_set=f", or {variable} to the folder to use")


def under_home(usual: Callable[[], str | Path], *, or_set: str = "") -> Path:
    """The `usual` folder of the system. Raises RequestError for a user without a home folder;
    `or_set`: what else helps."""
    try:
        folder = Path(usual())
    except RuntimeError:
        folder = Path()
    if not folder.is_absolute():  # as some versions of platformdirs leave it
        raise RequestError(
            f"the user with id {user_number()} has no home folder on this system",
            remedy=f"set HOME{or_set}",
        )
    return folder


def expanded(path: str | Path) -> Path:
    """The `path` with ~ as the home folder. Raises RequestError where that is not known."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise RequestError(
            f"{path}: the home folder that ~ stands for is not known",
            remedy="write the path without ~, or set HOME",
        ) from error


def home_or_none() -> Path | None:
    """The home folder; None: the user has none."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def user_name() -> str:
    """The name of the user. Raises RequestError for a user without one."""
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:  # as Python 3.12 says it, or 3.13
        raise RequestError(
            f"the user with id {user_number()} has no name on this system",
            remedy="set USER, or give the user a line in /etc/passwd",
        ) from error
