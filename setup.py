"""The packages of the wheel: `edge` and the folders beside it, without benches and tests."""

from setuptools import find_packages, setup

FOLDERS = ["demos", "kernels", "offload", "partition", "transport"]

beside = find_packages(
    include=[name for folder in FOLDERS for name in (folder, f"{folder}.*")],
    exclude=["demos.bench", "demos.bench.*"],
)
setup(packages=find_packages(include=["edge", "edge.*"]) + [f"edge.{name}" for name in beside])
