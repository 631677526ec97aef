"""`edge inspect`: what people read of a checkpoint, and what hostile files do to a terminal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from edge.api.known_models import inspect
from edge.cli.inspect_view import show_inspection
from edge.models.families import FAMILIES, WITH_PICTURES
from edge.studies.inspection import describe
from edge.weights.header import read_header
from tests.support import gguf_bytes
from tests.support.checkpoints import TinyCheckpoint
from tests.support.gguf_files import Type, write_gguf
from tests.support.processes import edge as run_edge

DEMO = Path(__file__).parents[3] / "demos" / "model"

EVIL = "\x1b]0;owned\x07\x1b[2J\u202e[bold]:smile:\r\n"


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "240")


def lines(text: str) -> list[str]:
    """The words of each line, without what tables are drawn with."""
    return [" ".join(line.replace("│", " ").split()) for line in text.split("\n")]


def test_a_folder() -> None:
    outcome = run_edge("inspect", DEMO)
    assert (outcome.code, outcome.err) == (0, "")
    rows = lines(outcome.out)
    for expected in (
        "form a Hugging Face folder, 2.5 MiB of weights",
        "family llama",
        "parameters 1.3 M (1,304,192)",
        "hidden size 128",
        "vocabulary 768; a head of its own",
        "longest context 512 tokens",
        "rotary positions base 10,000",
        "tokenizer BPE, byte level; 768 tokens",
        "special tokens bos <|begin|>, eos <|end|>, pad <|pad|>",
        "answers end at <|end|> (2)",
        "chat template default: 449 characters",
        "0–5 8 4 16 352 all tokens none usual",
        "BF16 57 1.3 M 2.5 MiB 16",
        "auto 0.728 1.0 MiB 131.8 MiB yes as int4",
        "int8 1.125 1.6 MiB 132.4 MiB yes 8 bits in blocks of 32, "
        "9 bits a weight with their scales",
        "float32 3.0 KiB 1.5 MiB",
    ):
        assert expected in rows, expected
    assert outcome.out.splitlines()[-1] == (
        f"edge plan {DEMO} tells what would run where, and how fast."
    )
    assert "Chat template" not in outcome.out


def test_its_chat_template() -> None:
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    outcome = run_edge("inspect", DEMO, "--template")
    assert f"Chat template default:\n{settings['chat_template']}\n" in outcome.out
    value = json.loads(run_edge("inspect", DEMO, "--template", "--json").out)
    assert value["tokenizer"]["chat_templates"] == {"default": settings["chat_template"]}


def test_layers_of_two_kinds_and_blocks(
    tiny_checkpoint: Callable[..., TinyCheckpoint], tmp_path: Path
) -> None:
    rows = lines(run_edge("inspect", tiny_checkpoint("qwen2").path).out)
    assert "0–1 5 5 16 113 all tokens query, key, value usual" in rows
    assert "2–3 5 5 16 113 the last 6 query, key, value usual" in rows
    rows = lines(run_edge("inspect", tiny_checkpoint("qwen3").path).out)
    assert "0–3 6 1 64 90 all tokens none usual, query, key" in rows
    assert "vocabulary 131; the head is the table of embeddings" in rows
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_checkpoint("llama_in_blocks").path, kind=Type.Q4_K)
    out = run_edge("inspect", path).out
    assert "form GGUF," in " ".join(out.split())
    assert "as stored: blocks of Q4_K" in out


def test_one_that_fits_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    show_inspection(describe(read_header(DEMO), usable_bytes=1 << 20), given="m", template=False)
    shown = capsys.readouterr().out
    assert "A daemon here would offer 1.0 MiB of memory now." in shown
    assert "It fits this machine in no dtype" in shown
    assert " yes" not in shown


def test_one_that_does_not_run(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    outcome = run_edge("inspect", folder)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines()[-1] == (
        f"Edge does not run it: {folder}/config.json: model_type 'mamba' is not a family Edge "
        f"runs; it runs {', '.join(sorted((*FAMILIES, *WITH_PICTURES)))}."
    )
    rows = lines(outcome.out)
    assert "0–5 8 4 16 352 all tokens ? ?" in rows
    assert "BF16 57 1.3 M 2.5 MiB 16" in rows
    assert "in memory" not in outcome.out
    value = json.loads(run_edge("inspect", folder, "--json").out)
    assert (value["family"], value["held"]) == ("mamba", [])
    assert "is not a family Edge runs" in value["problem"]


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    for path, cause in (
        (tmp_path / "none", "is not there; give the folder of a"),
        (tmp_path, "config.json is missing"),
    ):
        outcome = run_edge("inspect", path)
        assert cause in outcome.sentence()
        assert outcome.out == ""
        outcome = run_edge("inspect", path, "--json")
        assert cause in json.loads(outcome.out)["error"]["message"]


def evil_folder(folder: Path) -> Path:
    path = Path(shutil.copytree(DEMO, folder / f"m{EVIL.replace('/', '')}"))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings |= {"bos_token": EVIL, f"{EVIL}_token": EVIL, "chat_template": f"a{EVIL}b"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((path / "config.json").read_text())
    rope = {"rope_type": EVIL, "rope_theta": 1e4}
    (path / "config.json").write_text(
        json.dumps({**config, "model_type": EVIL, "rope_parameters": rope,
                    "quantization_config": {"quant_method": EVIL}})
    )  # fmt: skip
    return path


def evil_file(folder: Path) -> Path:
    path = folder / f"m{EVIL}.gguf"
    tensors = {**gguf_bytes.tensors(), f"blk.0.{EVIL}": gguf_bytes.tensors()["rope_freqs.weight"]}
    infos, data = gguf_bytes.placed(tensors)
    metadata = {**gguf_bytes.METADATA, **gguf_bytes.byte_pieces()}
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[1] = EVIL
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.chat_template": f"a{EVIL}b"}
    metadata |= {"tokenizer.chat_templates": [EVIL], f"tokenizer.chat_template.{EVIL}": EVIL}
    path.write_bytes(gguf_bytes.header(metadata, infos) + data)
    return path


@pytest.mark.parametrize("make", [evil_folder, evil_file])
def test_names_and_texts_of_strangers_do_nothing(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    path = make(tmp_path)
    assert inspect(path).problem is not None
    outcome = run_edge("inspect", path, "--template")
    assert (outcome.code, outcome.err) == (0, "")
    assert all(map(str.isprintable, outcome.out.split("\n")))
    assert r"\x1b]0;owned\x07\x1b[2J\u202e[bold]:smile:\r" in outcome.out
    for options in ((), ("--template",)):
        text = run_edge("inspect", path, "--json", *options).out
        assert text.isascii()
        assert all(map(str.isprintable, text.split("\n")))
        assert json.loads(text)["name"] == path.name


def test_long_texts_are_cut(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "x" * 100_000}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {f"a{number}_token": "y" * 10_000 for number in range(1000)}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert len(run_edge("inspect", folder).out) < 10_000
    assert len(run_edge("inspect", folder, "--json").out) < 20_000
