"""Encoder–decoder exports over peers of this process answer as transformers does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shlex
import warnings
import wave
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    EncoderDecoderCache,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput

from edge.api.encoder_decoder import AsyncEncoderDecoder, load_graphs
from edge.errors import CheckpointError, NetworkError, RequestError
from edge.graphs.atoms import Atoms
from edge.graphs.export_folder import ExportFolder
from edge.graphs.sound import FeatureSettings, log_mel, pieces, read_wav
from edge.partition import GraphPlan, GraphStage
from edge.progress import ignore_progress
from edge.protocol.peer_info import describe_peer
from edge.runs.graphs.remote_part import DeviceGoneError, RemotePart
from tests.support.null_peers import null_peers
from tests.support.processes import ROOT, edge
from tests.support.slow_cases import shown_in_parts

OPSET = 17


def t5() -> Any:
    """T5 with gated layers; its decoder begins with the padding token."""
    torch.manual_seed(1)
    config = T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        feed_forward_proj="gated-gelu", decoder_start_token_id=0, attn_implementation="eager",
        tie_word_embeddings=False,
    )  # fmt: skip
    return _sharp(T5ForConditionalGeneration(config), 10.0)


def bart() -> Any:
    """BART with learned positions, which is forced to begin with token 0."""
    torch.manual_seed(2)
    config = BartConfig(
        vocab_size=64, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        max_position_embeddings=64, attn_implementation="eager",
        tie_word_embeddings=False,
    )  # fmt: skip
    return _sharp(BartForConditionalGeneration(config))


def whisper() -> Any:
    """Whisper for sounds of one second."""
    torch.manual_seed(3)
    config = WhisperConfig(
        vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=20,
        max_source_positions=50, max_target_positions=40, pad_token_id=1, bos_token_id=1,
        eos_token_id=1, decoder_start_token_id=2, attn_implementation="eager",
        tie_word_embeddings=False,
        suppress_tokens=[5, 6], begin_suppress_tokens=[7, 1],
    )  # fmt: skip
    return _sharp(WhisperForConditionalGeneration(config))


def _sharp(model: Any, factor: float = 3.0) -> Any:
    """With larger weights, so that tokens differ clearly and follow from the input."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(1.0 if "lm_head" in name or "proj_out" in name else factor)
    return model.eval()


MODELS: Mapping[str, Callable[[], Any]] = {"t5": t5, "bart": bart, "whisper": whisper}


class _Encoder(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = model.get_encoder()

    def forward(self, first: Any, *mask: Any) -> Any:
        return self.encoder(first, *mask).last_hidden_state


class _Decoder(torch.nn.Module):  # type: ignore[misc]
    """With caches as plain tensors. is_first: it fills all caches."""

    def __init__(self, model: Any, *, has_mask: bool, is_first: bool) -> None:
        super().__init__()
        self.model, self.has_mask, self.is_first = model, has_mask, is_first

    def forward(self, *tensors: Any) -> Any:
        rest = list(tensors)
        mask = rest.pop(0) if self.has_mask else None
        ids = rest.pop(0)
        hidden = rest.pop(0) if self.is_first else torch.zeros(1, 1, 1)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        layers = _layers(self.model)
        for layer in range(layers if not self.is_first else 0):
            own_key, own_value, key, value = rest[4 * layer : 4 * layer + 4]
            cache.self_attention_cache.update(own_key, own_value, layer)
            cache.cross_attention_cache.update(key, value, layer)
            cache.is_updated[layer] = True
        found = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
            attention_mask=mask,
            decoder_input_ids=ids,
            past_key_values=cache,
            use_cache=True,
        )
        made = found.past_key_values
        given = [found.logits]
        for layer in range(layers):
            own = made.self_attention_cache.layers[layer]
            given += [own.keys, own.values]
            if self.is_first:
                cross = made.cross_attention_cache.layers[layer]
                given += [cross.keys, cross.values]
        return tuple(given)


def _layers(model: Any) -> int:
    config = model.config
    return int(getattr(config, "num_decoder_layers", None) or config.decoder_layers)


def export(model: Any, folder: Path) -> Path:
    """The folder with the graphs and the files beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    hears = config.model_type == "whisper"
    layers = _layers(model)
    ids, mask = torch.ones(2, 5, dtype=torch.int64), torch.ones(2, 5, dtype=torch.int64)
    first = torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions) if hears else ids
    encoder = _Encoder(model)
    with torch.no_grad():
        hidden = encoder(first, *(() if hears else (mask,)))
    text = {0: "batch", 1: "encoder_sequence"}
    _write(
        encoder, folder / "encoder_model.onnx", (first,) if hears else (first, mask),
        {"input_features": {0: "batch"}} if hears else {"input_ids": text, "attention_mask": text},
        {"last_hidden_state": text},
    )  # fmt: skip
    masks: Any = {} if hears else {"encoder_attention_mask": text}
    decoder_ids = {0: "batch", 1: "decoder_sequence"}
    begin = _Decoder(model, has_mask=not hears, is_first=True)
    given = (*(() if hears else (mask,)), torch.ones(2, 2, dtype=torch.int64), hidden)
    with torch.no_grad():
        made = begin(*given)
    names = [
        f"{layer}.{side}.{kind}"
        for layer in range(layers)
        for side in ("decoder", "encoder")
        for kind in ("key", "value")
    ]
    present = {f"present.{n}": {0: "batch", 2: f"{n.split('.')[1]}_length"} for n in names}
    _write(
        begin, folder / "decoder_model.onnx", given,
        {**masks, "input_ids": decoder_ids, "encoder_hidden_states": text},
        {"logits": decoder_ids, **present},
    )  # fmt: skip
    past = {f"past_key_values.{n}": {0: "batch", 2: f"past_{n.split('.')[1]}"} for n in names}
    later = _Decoder(model, has_mask=not hears, is_first=False)
    _write(
        later, folder / "decoder_with_past_model.onnx",
        (*(() if hears else (mask,)), torch.ones(2, 1, dtype=torch.int64), *made[1:]),
        {**masks, "input_ids": {0: "batch"}, **past},
        {"logits": {0: "batch"}, **{n: d for n, d in present.items() if ".decoder." in n}},
    )  # fmt: skip
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    if hears:
        WhisperFeatureExtractor(
            feature_size=config.num_mel_bins, chunk_length=1, n_fft=400, hop_length=160
        ).save_pretrained(folder)
    return folder


def _write(
    module: torch.nn.Module,
    path: Path,
    given: Sequence[Any],
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
) -> None:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, tuple(given), str(path), input_names=list(inputs), output_names=list(outputs),
            dynamic_axes={**inputs, **outputs}, opset_version=OPSET, dynamo=False,
        )  # fmt: skip


INPUT = [5, 9, 14, 3, 22, 31]
ASKED: list[dict[str, Any]] = [
    {"max_new_tokens": 12, "num_beams": 1},
    {"max_new_tokens": 12, "num_beams": 3},
    {"max_new_tokens": 8, "num_beams": 4, "length_penalty": -0.5, "early_stopping": True},
    {"max_new_tokens": 10, "num_beams": 2, "length_penalty": 2.0, "early_stopping": "never"},
]


class Exports(dict[str, Path]):
    """The folders of models that were asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, name: str) -> Path:
        self[name] = export(MODELS[name](), self._folder / name)
        return self[name]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    return Exports(tmp_path_factory.mktemp("exports"))


@contextlib.asynccontextmanager
async def loaded(folder: Path, peers: Path, **options: Any) -> AsyncIterator[AsyncEncoderDecoder]:
    """The encoder on one peer, the decoder on another."""
    async with null_peers(peers, 2) as daemons, asyncio.timeout(100):
        known = [await describe_peer(each.resources.addresses[0], None) for each in daemons]
        asked = {
            "plan": "auto", "max_tokens": 24, "max_beams": 4, "input_tokens": 8,
            "time_limit_s": 60.0, **options,
        }  # fmt: skip
        async with await load_graphs(folder, known, ignore_progress, **asked) as graphs:
            yield graphs


def given_to(name: str) -> dict[str, Any]:
    if name != "whisper":
        ids = np.array([INPUT])
        return {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    features = np.random.default_rng(1).normal(0, 1, (1, 20, 100))
    return {"input_features": features.astype(np.float32)}


def expected(name: str, **asked: Any) -> tuple[list[int], float]:
    """The tokens that transformers chooses, and their score."""
    model = MODELS[name]()
    tensors = {key: torch.from_numpy(each) for key, each in given_to(name).items()}
    found = GenerationMixin.generate(
        model, **tensors, **asked, do_sample=False, output_scores=True, return_dict_in_generate=True
    )
    tokens = found.sequences[0, 1:].tolist()
    ends = model.generation_config.eos_token_id
    if ends in tokens:
        tokens = tokens[: tokens.index(ends)]
    score = found.sequences_scores[0].item() if asked["num_beams"] > 1 else 0.0
    return tokens, score


@shown_in_parts("e2e/test_encoder_decoders.py")
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers(
    name: str, folders: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, int]] = []
    true_run = RemotePart.run

    async def run(remote: RemotePart, arrays: Any, kept: Any = None, fed: Any = None) -> Any:
        if kept is not None:
            names = [n for n in remote.part.inputs if n not in kept.take]
            sent.append({n: arrays[n].nbytes for n in names})
        return await true_run(remote, arrays, kept, fed)

    monkeypatch.setattr(RemotePart, "run", run)

    async def main() -> None:
        plan = apart(folders[name])
        async with loaded(folders[name], tmp_path, plan=plan) as graphs:
            for asked in ASKED:
                sent.clear()
                found = await graphs.generate(given_to(name), **asked)
                tokens, score = expected(name, **asked)
                assert list(found.token_ids) == tokens
                assert found.score == pytest.approx(score, abs=1e-4)
                # Caches stay where they are: a step sends a token of each row, and a flag.
                assert all(each.keys() == {"input_ids", "use_cache_branch"} for each in sent[1:])
                assert all(each["input_ids"] == 8 * asked["num_beams"] for each in sent[1:])

    asyncio.run(main())


def apart(folder: Path) -> dict[str, GraphPlan]:
    """The encoder on the first peer, the decoder on the second."""
    found = ExportFolder(folder, 24, 4)
    return {
        name: GraphPlan(stages=(GraphStage(device=device, atoms=range(len(Atoms(file)))),))
        for name, device, file in (
            ("encoder", "null-0", found.encoder),
            ("decoder", "null-1", found.decoder),
        )
    }


def test_a_lost_decoder_is_replaced_and_the_encoder_runs_once(
    folders: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that forgets its caches, and one that is lost; also the layout of one decoder file."""
    folder = tmp_path / "merged"
    (folder / "onnx").mkdir(parents=True)
    for file in folders["t5"].iterdir():
        if not file.name.startswith("decoder"):
            place = folder / "onnx" if file.suffix == ".onnx" else folder
            (place / file.name).write_bytes(file.read_bytes())
    merged = ExportFolder(folders["t5"], 24, 4).decoder.model
    (folder / "onnx" / "decoder_model_merged.onnx").write_bytes(merged.SerializeToString())
    runs: list[str] = []
    true_run = RemotePart.run

    async def run(remote: RemotePart, arrays: Any, kept: Any = None, fed: Any = None) -> Any:
        runs.append("encoder" if kept is None else "decoder")
        if runs.count("decoder") == 3:
            remote._dropped.append(kept.slot)
        if runs.count("decoder") == 7:
            raise DeviceGoneError(remote.peer.id, NetworkError("gone"))
        return await true_run(remote, arrays, kept, fed)

    async def main() -> None:
        plan = apart(folder)
        async with loaded(folder, tmp_path, plan=plan) as graphs:
            await refuse_wrong_questions(graphs)
            monkeypatch.setattr(RemotePart, "run", run)
            found = await graphs.generate(INPUT, **ASKED[1])
            assert graphs.plans["decoder"].devices == ("null-0",)
            assert list(found.token_ids) == expected("t5", **ASKED[1])[0]
            assert runs.count("encoder") == 1

    asyncio.run(main())


async def refuse_wrong_questions(graphs: AsyncEncoderDecoder) -> None:
    ids = np.array([INPUT])
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (INPUT, {"num_beams": 5}, "num_beams must be 1 to 4"),
        (INPUT, {"max_new_tokens": 24}, "max_new_tokens must be 1 to 23"),
        (INPUT, {"length_penalty": 99}, "length_penalty must be"),
        (INPUT, {"prompt": []}, "prompt has no token ids"),
        ("text", {}, "no tokenizer.json"),
        ({"input_ids": np.repeat(ids, 2, 0)}, {}, "one input at a time"),
        ({"input_ids": ids, "attention_mask": 0 * ids}, {}, "is padded"),
        ({"input_ids": ids}, {}, "'attention_mask' is missing"),
    ]
    for inputs, options, said in cases:
        with pytest.raises(RequestError, match=said):
            await graphs.generate(inputs, **options)
    assert not graphs.takes_sound
    with pytest.raises(RequestError, match="takes no sound"):
        await graphs.transcribe(b"")


def tone(seconds: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    times = np.arange(int(16000 * seconds)) / 16000
    noise = np.random.default_rng(5).normal(0, 0.05, len(times))
    return (0.4 * np.sin(2 * np.pi * (300 + 400 * times) * times) + noise).astype(np.float32)


def wav(samples: np.ndarray[Any, Any], folder: Path, width: int, channels: int = 1) -> Path:
    whole = (samples.astype(np.float64) * ((1 << (8 * width - 1)) - 1)).round().astype(np.int64)
    whole = np.repeat(whole[:, None], channels, axis=1) + (128 if width == 1 else 0)
    content = whole.astype("<i8").reshape(-1, 1).view(np.uint8)[:, :width].tobytes()
    with wave.open(str(folder / "sound.wav"), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(16000)
        file.writeframes(content)
    return folder / "sound.wav"


@pytest.mark.parametrize(("bands", "seconds", "hop"), [(80, 30, 160), (128, 7, 160), (20, 1, 128)])
def test_features_are_those_of_transformers(
    bands: int, seconds: int, hop: int, tmp_path: Path
) -> None:
    extractor = WhisperFeatureExtractor(
        feature_size=bands, chunk_length=seconds, hop_length=hop, n_fft=400
    )
    extractor.save_pretrained(tmp_path)
    settings = FeatureSettings.open(tmp_path / "preprocessor_config.json")
    samples = tone(seconds * 0.7)
    (piece,) = pieces(samples, settings)
    expected = extractor(samples, sampling_rate=16000, return_tensors="np").input_features
    found = log_mel(piece, settings)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.parametrize(("width", "channels"), [(1, 1), (2, 2), (3, 1), (4, 1)])
def test_wav_files_of_every_width_are_read(width: int, channels: int, tmp_path: Path) -> None:
    samples = tone(0.1)
    found = read_wav(wav(samples, tmp_path, width, channels), 16000)
    np.testing.assert_allclose(found, samples, atol=1.01 / (1 << (8 * width - 1)))
    with pytest.raises(RequestError, match="the model takes 8,000"):
        read_wav(tmp_path / "sound.wav", 8000)
    content = (tmp_path / "sound.wav").read_bytes()
    for bad in (b"", content[:30], b"OggS" + content[4:]):
        with pytest.raises(RequestError, match="cannot be read as WAV"):
            read_wav(bad, 16000)


class Spoken:
    """An export for sounds, a sound of two pieces of a second each, and what is heard in it."""

    def __init__(self, folders: Exports, place: Path) -> None:
        self.folder = place / "whisper"
        self.folder.mkdir()
        for file in folders["whisper"].iterdir():
            (self.folder / file.name).write_bytes(file.read_bytes())
        tokens = {"lang_to_id": {"<|en|>": 50, "<|de|>": 51}, "task_to_id": {"transcribe": 52}}
        change(self.folder, "generation_config.json", **tokens, no_timestamps_token_id=53)
        self._samples = tone(1.5)
        self.file = wav(self._samples, place, 4)

    def answers(self, begin: list[int]) -> list[int]:
        extractor = WhisperFeatureExtractor.from_pretrained(self.folder)
        model, found = MODELS["whisper"](), []
        for piece in (self._samples[:16000], self._samples[16000:]):
            features = extractor(piece, sampling_rate=16000, return_tensors="pt").input_features
            ids = torch.tensor([begin])
            made = GenerationMixin.generate(
                model, input_features=features, decoder_input_ids=ids, max_length=24, num_beams=1
            )[0, len(begin) :].tolist()
            found += made[: made.index(1)] if 1 in made else made
        return found


def test_a_sound_is_transcribed_in_pieces(folders: Exports, tmp_path: Path) -> None:
    """Its language is found from the first."""
    spoken = Spoken(folders, tmp_path)
    answers = spoken.answers

    async def main() -> None:
        async with loaded(spoken.folder, tmp_path, plan=apart(spoken.folder)) as graphs:
            file = spoken.file
            german = await graphs.transcribe(file, language="de")
            assert list(german.token_ids) == answers([2, 51, 52, 53])
            some = await graphs.transcribe(file.read_bytes())
            assert list(some.token_ids) in [answers([2, each, 52, 53]) for each in (50, 51)]
            with pytest.raises(RequestError, match="does not know the language 'fr'"):
                await graphs.transcribe(file, language="fr")
            with pytest.raises(RequestError, match="samples are float32"):
                await graphs.transcribe(np.zeros((2, 3), np.float32))

    asyncio.run(main())


@shown_in_parts("e2e/test_encoder_decoders.py", "multiprocess/test_graphs.py")
def test_a_command_transcribes_a_sound(folders: Exports, tmp_path: Path) -> None:
    spoken = Spoken(folders, tmp_path)
    words = ("--sound", str(spoken.file), "--language", "de", "--local", "1")
    done = edge("graph", "generate", str(spoken.folder), *words, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["token_ids"] == spoken.answers([2, 51, 52, 53])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"feature_size": 0}, "feature_size is 0"),
        ({"dither": 1.0}, "dither"),
        ({"feature_extractor_type": "Other"}, "'Other'"),
        ({"feature_size": 21}, "makes features"),
    ],
)
def test_other_features_are_refused(
    values: dict[str, Any], said: str, folders: Exports, tmp_path: Path
) -> None:
    for file in folders["whisper"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change(tmp_path, "preprocessor_config.json", **values)
    with pytest.raises(CheckpointError, match=said):
        _settings = ExportFolder(tmp_path, None, 4).features


def change(folder: Path, file: str, **values: Any) -> None:
    found = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**found, **values}))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no encoder", "has no encoder_model.onnx"),
        ("no decoder", "neither decoder_model_merged.onnx nor decoder_with_past_model.onnx"),
        ("opsets", "use different opsets"),
        ("types", "has another type than"),
        ("penalty", "length_penalty is 'long'"),
        ("tokens", "eos_token_id is -1"),
    ],
)
def test_other_folders_are_no_exports(
    what: str, said: str, folders: Exports, tmp_path: Path
) -> None:
    for file in folders["t5"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    later = tmp_path / "decoder_with_past_model.onnx"
    model = onnx.load(later)
    if what == "no encoder":
        (tmp_path / "encoder_model.onnx").unlink()
    elif what == "no decoder":
        later.unlink()
    elif what == "opsets":
        model.opset_import[0].version = 18
        onnx.save(model, later)
    elif what == "types":
        value = next(each for each in model.graph.input if each.name == "input_ids")
        value.type.tensor_type.elem_type = onnx.TensorProto.INT32
        onnx.save(model, later)
    elif what == "penalty":
        change(tmp_path, "generation_config.json", length_penalty="long")
    else:
        change(tmp_path, "generation_config.json", eos_token_id=-1)
    with pytest.raises(CheckpointError, match=said):
        ExportFolder(tmp_path, None, 4)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return export(MODELS["t5"](), tmp_path / "t5")


@shown_in_parts("e2e/test_encoder_decoders.py")
def test_the_command_and_the_program_of_the_guide_run(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = (ROOT / "docs" / "guide" / "graphs.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^(edge graph generate .*)$", guide, re.MULTILINE)
    done = edge(
        *shlex.split(command.replace("71,307,1", "7,30,1"))[1:], "--max-new-tokens", "20", "--json"
    )
    assert done.code == 0, done.err
    tokens = json.loads(done.out)["token_ids"]
    (program,) = [p for p in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if '"t5"' in p]
    exec(compile(program.replace("71, 307, 1", "7, 30, 1"), "graphs.md", "exec"), {})
    assert str(tuple(tokens)) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give one of --input, --text, --tokens and --sound"),
        (("--tokens", "1", "--language", "de"), "--language is for --sound"),
        (("--sound", "a.wav", "--beams", "2"), "is transcribed as the export says"),
        (("--tokens", "1;2"), "is not ID,ID"),
        (("--tokens", "1", "--text", "a"), "give one of"),
        (("--tokens", "1"), "has no encoder_model.onnx"),
    ],
)
def test_mistakes_are_told(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = edge("graph", "generate", str(tmp_path), *words, "--local", "1")
    assert done.code in (1, 2)
    assert said in done.err
