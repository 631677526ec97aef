"""No two classes have one name, so that a name says which is meant.

Private classes (`_Name`) may repeat: each is known in its own file alone.
"""

from __future__ import annotations

import re
from collections import defaultdict

from tests.architecture.test_docs import MODULES
from tests.architecture.test_names import REPOSITORY

PUBLIC_CLASS = re.compile(r"^\s*class ([A-Za-z]\w*)[(:\[]", re.MULTILINE)
"""As a line of code begins; to parse every file takes seconds."""

BY_DEVICE = (
    "edge/backends/onnx/",
    "edge/backends/ort/",
    "edge/backends/webgpu/",
    "edge/backends/triton/",
    "edge/backends/null/",
)
"""Folders that do the same, each for one kind of device; nothing imports two of them."""

OF_LOWER_PACKAGES = {"CapacityError", "PeerLostError", "PlanError", "ProtocolError"}
"""Errors of partition and transport that are mapped to errors of `edge/errors.py`, which say what a
user can do."""


def homes() -> dict[str, list[str]]:
    """The files of each public class."""
    found: dict[str, list[str]] = defaultdict(list)
    for module in MODULES:
        file = module.relative_to(REPOSITORY).as_posix()
        if file.startswith("demos/"):
            continue
        for name in PUBLIC_CLASS.findall(module.read_text(encoding="utf-8")):
            found[name].append(file)
    return found


def are_one(files: list[str]) -> bool:
    """Whether one of them at most is meant on each kind of device."""
    of_devices = [sum(file.startswith(folder) for file in files) for folder in BY_DEVICE]
    return len(files) - sum(of_devices) + max(of_devices) <= 1


def test_no_two_classes_have_one_name() -> None:
    found = homes()
    assert len(found) > 500, "all were seen"
    repeated = {name: files for name, files in found.items() if not are_one(files)}
    assert repeated.keys() <= OF_LOWER_PACKAGES, repeated
    assert repeated.keys() >= OF_LOWER_PACKAGES, "exceptions that are none any more"
