"""Figures with the conditions they were taken under, as rows of results.csv."""

from __future__ import annotations

import csv
import datetime
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil

RESULTS = Path(__file__).with_name("results.csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric of one run; the fields are the columns of results.csv."""

    date: str
    commit: str
    question: str
    variant: str
    metric: str
    unit: str
    p20: float
    p50: float
    p80: float
    hardware: str
    link: str
    model: str
    versions: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """Repeated measurements of one thing; counts name what they count as the unit."""

    name: str
    unit: str
    values: Sequence[float]

    def __post_init__(self) -> None:
        if not (self.name and self.unit):
            raise ValueError(
                f"a metric wants a name and a unit, not {self.name!r} and {self.unit!r}"
            )

    @property
    def percentiles(self) -> tuple[float, float, float]:
        """The 20th, 50th and 80th."""
        low, middle, high = np.percentile(self.values, [20, 50, 80])
        return float(f"{low:.4g}"), float(f"{middle:.4g}"), float(f"{high:.4g}")


@dataclass(slots=True)
class Figures:
    """The metrics of a run, as they are taken: by name and unit, a value for each round."""

    values: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, name: str, unit: str, *values: float) -> None:
        self.values.setdefault((name, unit), []).extend(values)

    def __iter__(self) -> Iterator[Metric]:
        return (Metric(name=n, unit=u, values=values) for (n, u), values in self.values.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Under which anything is measured here and now."""

    date: str
    commit: str
    hardware: str
    versions: str


def conditions() -> Conditions:
    return Conditions(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        commit=_commit(),
        hardware=_hardware(),
        versions=_versions(),
    )


def rows(
    metrics: Iterable[Metric], *, question: str, variant: str, link: str, model: str
) -> list[Row]:
    """The metrics with everything that is the same for a whole run."""
    same = asdict(conditions())
    same |= {"question": question, "variant": variant, "link": link, "model": model}
    found: list[Row] = []
    for metric in metrics:
        p20, p50, p80 = metric.percentiles
        found.append(Row(metric=metric.name, unit=metric.unit, p20=p20, p50=p50, p80=p80, **same))
    return found


def show(measured: Iterable[Row]) -> None:
    """The figures for people."""
    print(f"{'metric':<48}{'unit':<8}{'p20':>10}{'p50':>10}{'p80':>10}")
    for row in measured:
        print(f"{row.metric:<48}{row.unit:<8}{row.p20:>10g}{row.p50:>10g}{row.p80:>10g}")


def append(measured: Sequence[Any], path: Path = RESULTS) -> None:
    """Add rows, dataclasses of one kind, to a file that has their header, or make the file."""
    is_new = not path.exists()
    columns = [field.name for field in fields(measured[0])]
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(asdict(row) for row in measured)


def _commit() -> str:
    """The commit of the checkout, marked if code differs from it; "-" outside of one."""
    try:
        commit = _git("rev-parse", "--short=7", "HEAD").strip()
        elsewhere = (":/", ":!*.csv", ":!*.md")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", *elsewhere)
    except (OSError, subprocess.CalledProcessError):
        return "-"
    return f"{commit}-dirty" if changed else commit


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=True
    )
    return done.stdout


def _hardware() -> str:
    """Cores this process may use, not all there are. BENCH_PROCESSOR names a processor of which a
    part is hidden."""
    with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
        names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    gigabytes = psutil.virtual_memory().total / (1 << 30)
    processor = os.environ.get("BENCH_PROCESSOR") or (names[0] if names else platform.machine())
    return f"{processor}, {len(os.sched_getaffinity(0))} cores, {gigabytes:.0f} GiB"


def _versions() -> str:
    packages = ("edge-inference", "onnxruntime", "numpy")
    listed = [f"{package} {_version(package)}" for package in packages]
    return ", ".join([f"Python {platform.python_version()}", *listed])


def _version(package: str) -> str:
    """The version of an installed package; a checkout on Python's path is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "checkout"
