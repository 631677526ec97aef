"""A processor without the instructions that wheels are built with is refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

import edge
from edge.cli.main import main
from edge.errors import RequestError
from edge.host import instructions
from edge.host.instructions import check_instructions

V2 = "fpu sse sse2 ht lm pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm"
ARM = "processor\t: 0\nBogoMIPS\t: 100.00\nFeatures\t: fp asimd cpuid\n"


def told(folder: Path, text: str) -> Path:
    file = folder / "cpuinfo"
    file.write_text(text)
    return file


@pytest.fixture
def old_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the CPU type kvm64 of virtual machines has it."""
    file = told(tmp_path, "processor\t: 0\nflags\t\t: fpu sse sse2 ht lm pni cx16\n")
    monkeypatch.setattr(check_instructions, "__defaults__", (file,))


@pytest.mark.parametrize("text", [f"flags\t\t: {V2}\n", ARM, "", "processor: 0\n"])
def test_processors_that_have_them_or_tell_nothing_pass(text: str, tmp_path: Path) -> None:
    check_instructions(told(tmp_path, text))
    check_instructions(tmp_path / "missing")


def test_a_flag_is_a_whole_word(tmp_path: Path) -> None:
    flags = V2.replace(" ssse3", "").replace("sse4_2", "sse4_2x")
    with pytest.raises(RequestError, match=r"lacks SSE4\.2, SSSE3, which numpy"):
        check_instructions(told(tmp_path, f"flags\t\t: {flags}\n"))


def test_the_first_of_many_processors_is_enough(tmp_path: Path) -> None:
    processor = f"processor\t: 0\nmodel name\t: {'x' * 2000}\nflags\t\t: {V2}\n\n"
    check_instructions(told(tmp_path, processor * 200))
    assert len(processor) < instructions._FIRST_PROCESSOR_BYTES


@pytest.mark.usefixtures("old_processor")
def test_the_command_line_ends_with_the_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["peers"])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("edge: this processor lacks LAHF, POPCNT, SSE4.1, SSE4.2, SSSE3, which")
    assert "CPU type host" in said


@pytest.mark.usefixtures("old_processor")
def test_python_programs_are_told_by_the_first_name() -> None:
    with pytest.raises(RequestError, match="this processor lacks"):
        edge.__getattr__("Cluster")
