"""Edge's packages have plain names that another distribution may have too: then say so at once.

Looks only at where packages would be imported from, and imports none of them: reading the metadata
of everything installed would take longer than the rest of the start.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from edge.errors import EdgeError

PACKAGES = ("partition", "transport", "kernels", "offload")
"""They must be imported from the folder that `edge` is in."""


def require_own_packages() -> None:
    """Raise EdgeError with one sentence if one of Edge's names belongs to someone else here."""
    home = Path(__file__).parents[1]
    for name in PACKAGES:
        place = _place(name)
        if place is None:
            raise EdgeError(f"package {name!r} is missing from {home}; install Edge again")
        if place.parent != home:
            raise EdgeError(
                f"package {name!r} would be imported from {place}, which is not Edge's ({home}): "
                "install Edge in a virtual environment of its own, or rename that folder or file"
            )
    # Two distributions in one folder: whichever was installed last has overwritten the other.
    for name in ("edge", *PACKAGES):
        for record in home.glob(f"{name}-*.dist-info/RECORD"):
            if f"\n{name}/__init__.py," in f"\n{record.read_text(encoding='utf-8')}":
                raise EdgeError(
                    f"the distribution {record.parent.stem} also owns package {name!r} in {home}: "
                    "install Edge in a virtual environment of its own"
                )


def _place(name: str) -> Path | None:
    """The folder of a package, or the file of a module; None when there is neither."""
    spec = find_spec(name)
    if spec is None:
        return None
    if spec.submodule_search_locations is not None:
        return next((Path(each) for each in spec.submodule_search_locations), None)
    return None if spec.origin is None else Path(spec.origin)
