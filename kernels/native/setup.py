"""Builds the library beside the package's module.

The compiler is `cc`, or what CC names; with several words, such as "python -m ziglang cc -target
aarch64-macos", it may compile for another system, which EDGE_KERNELS_FOR then names as wheels do:
macosx_11_0_arm64.
"""

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SOURCES = Path(__file__).resolve().parent / "src"
PLATFORM = os.environ.get("EDGE_KERNELS_FOR") or sysconfig.get_platform().replace("-", "_")
# Floats are rounded after each operation, so that all processors compute the same bits.
FLAGS = [
    *("-O3", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
]
X86 = {
    "attention": ["-mavx2", "-mfma"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx_vnni": ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni", "-mfma", "-mf16c"],
}
ARM64 = {"neon": ["-march=armv8.2-a+dotprod"]}
ARM64_OF_ZIG = {"neon": ["-mcpu=generic+dotprod"]}


def compile_library(target: Path, scratch: Path) -> None:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    flags = [*FLAGS, *shlex.split(os.environ.get("CFLAGS", ""))]
    if not PLATFORM.startswith("win"):
        flags.append("-fPIC")
    of_processor = {}
    if PLATFORM.endswith(("x86_64", "amd64")):
        of_processor = X86
    elif PLATFORM.endswith(("aarch64", "arm64")):
        of_processor = ARM64_OF_ZIG if "zig" in " ".join(compiler) else ARM64
    scratch.mkdir(parents=True, exist_ok=True)
    objects = []
    of_all: dict[str, list[str]] = {"plain": [], "grids": [], "product": [], "operator": []}
    of_all |= {"quantize": [], "attention": [], "attention_operator": []}
    for name, more in (of_all | of_processor).items():
        objects.append(str(scratch / f"{name}.o"))
        source = str(SOURCES / f"{name}.c")
        subprocess.run([*compiler, *flags, *more, "-c", source, "-o", objects[-1]], check=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    libraries = [] if PLATFORM.startswith(("win", "macos")) else ["-lm"]
    words = [*compiler, "-shared", *shlex.split(os.environ.get("LDFLAGS", ""))]
    subprocess.run([*words, "-o", str(target), *objects, *libraries], check=True)


class Build(build_py):
    def run(self) -> None:
        super().run()
        place = SOURCES.parent if self.editable_mode else Path(self.build_lib)
        compile_library(
            place / "edge_kernels" / "library.bin",
            Path(self.get_finalized_command("build").build_temp),
        )


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", PLATFORM

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False


setup(cmdclass={"build_py": Build, "bdist_wheel": Wheel})
