"""Sound as a speech model takes it: WAV files to samples, samples to log-mel features.

The features are those of transformers' WhisperFeatureExtractor.
"""

from __future__ import annotations

import io
import math
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge.errors import CheckpointError, RequestError, shown
from edge.offload import read_file
from edge.text.files import read_json

MOST_WAV_BYTES = 256 << 20
_LEAST_POWER = 1e-10
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSettings:
    """What preprocessor_config.json says of features."""

    bands: int
    samples_per_s: int
    window_samples: int
    hop_samples: int
    piece_samples: int
    """Samples of one piece; shorter sound is filled up with silence."""

    @classmethod
    def open(cls, path: Path) -> FeatureSettings:
        """Read the file. Raises CheckpointError if it describes other features than Whisper's."""
        value = read_json(path)
        usual: Mapping[str, tuple[int, int]] = {
            "feature_size": (80, 1024), "sampling_rate": (16000, 192000), "n_fft": (400, 1 << 16),
            "hop_length": (160, 1 << 16), "chunk_length": (30, 600),
        }  # fmt: skip
        found = {}
        for name, (default, most) in usual.items():
            each = value.get(name, default)
            if type(each) is not int or not 1 <= each <= most:
                raise CheckpointError(
                    f"{path}: {name} is {shown(each)}", remedy=f"give a number of 1 to {most:,}"
                )
            found[name] = each
        kind = value.get("feature_extractor_type", "WhisperFeatureExtractor")
        others = [name for name in ("do_normalize", "dither", "padding_value") if value.get(name)]
        if kind != "WhisperFeatureExtractor" or others:
            raise CheckpointError(
                f"{path} describes {', '.join(others) or shown(kind)}, and Edge computes the usual "
                "features of Whisper alone",
                remedy="compute the features yourself, and give them as arrays",
            )
        return cls(
            bands=found["feature_size"],
            samples_per_s=found["sampling_rate"],
            window_samples=found["n_fft"],
            hop_samples=found["hop_length"],
            piece_samples=found["chunk_length"] * found["sampling_rate"],
        )


def read_wav(file: Path | bytes, samples_per_s: int | None) -> Floats:
    """The samples of a WAV file, from -1 to 1, of all channels' mean: float32 [samples].

    Raises RequestError for another kind of file, or another rate than `samples_per_s`; None: any.
    """
    name = "the sound" if isinstance(file, bytes) else str(file)
    try:
        content = file if isinstance(file, bytes) else read_file(file, MOST_WAV_BYTES)
        with wave.open(io.BytesIO(content)) as sound:
            rate, channels, width = sound.getframerate(), sound.getnchannels(), sound.getsampwidth()
            if width not in (1, 2, 3, 4):
                raise ValueError(f"samples of {8 * width} bits")
            raw = sound.readframes(sound.getnframes())
    except (OSError, EOFError, ValueError, wave.Error) as error:
        raise RequestError(
            f"{name} cannot be read as WAV: {error or 'it is truncated'}",
            remedy="give PCM samples: ffmpeg -i sound.mp3 sound.wav",
        ) from error
    if samples_per_s is not None and rate != samples_per_s:
        raise RequestError(
            f"{name} has {rate:,} samples a second, and the model takes {samples_per_s:,}",
            remedy=f"convert it: ffmpeg -i in.wav -ar {samples_per_s} out.wav",
        )
    raw = raw[: len(raw) // (width * channels) * width * channels]
    if width == 1:
        samples = (np.frombuffer(raw, np.uint8).astype(np.float32) - 128) / 128
    elif width == 3:
        bytes_ = np.frombuffer(raw, np.uint8).reshape(-1, 3).astype(np.int32)
        whole = bytes_[:, 0] << 8 | bytes_[:, 1] << 16 | bytes_[:, 2] << 24
        samples = whole.astype(np.float32) / (1 << 31)
    else:
        whole = np.frombuffer(raw, f"<i{width}")
        samples = whole.astype(np.float32) / (1 << (8 * width - 1))
    found: Floats = samples.reshape(-1, channels).mean(axis=1, dtype=np.float32)
    return found


def checked_samples(samples: NDArray[np.float32]) -> Floats:
    """Samples of one channel as float32. Raises RequestError for another array."""
    if samples.ndim != 1 or samples.dtype.kind != "f":
        raise RequestError(
            f"samples are {samples.dtype} {list(samples.shape)}",
            remedy="give floats from -1 to 1 of one axis",
        )
    return samples.astype(np.float32)


def pieces(samples: Floats, settings: FeatureSettings) -> Sequence[Floats]:
    """The samples in pieces, the last one filled up with silence."""
    size = settings.piece_samples
    count = max(1, -(-len(samples) // size))
    padded = np.zeros(count * size, np.float32)
    padded[: len(samples)] = samples
    return list(padded.reshape(count, size))


def log_mel(samples: Floats, settings: FeatureSettings) -> Floats:
    """Features of one piece: [1, bands, samples / hop].

    log10 of the power in each mel band, at most 8 below the largest, then (x + 4) / 4. Windows are
    Hann's, centred, with the sound mirrored at its ends.
    """
    size, hop = settings.window_samples, settings.hop_samples
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)
    mirrored = np.pad(samples.astype(np.float64), size // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(mirrored, size)[::hop]
    power = np.abs(np.fft.rfft(frames[: len(samples) // hop] * window)) ** 2
    found = np.log10(np.maximum(power @ mel_filters(settings), _LEAST_POWER)).T
    found = np.maximum(found, found.max() - 8.0)
    features: Floats = ((found + 4.0) / 4.0)[None].astype(np.float32)
    return features


def mel_filters(settings: FeatureSettings) -> NDArray[np.float64]:
    """Slaney's mel filters: [frequencies, bands], triangles of equal area up to 8 kHz."""
    count = settings.window_samples // 2 + 1
    frequencies = np.linspace(0, settings.samples_per_s // 2, count)
    mels = np.linspace(0.0, _mel(8000.0), settings.bands + 2)
    edges = np.where(
        mels < 15, mels * 200 / 3, 1000 * np.exp(math.log(6.4) / 27 * np.maximum(mels - 15, 0))
    )
    widths = np.diff(edges)
    slopes = edges[None, :] - frequencies[:, None]
    found = np.maximum(0.0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    filters: NDArray[np.float64] = found * (2.0 / (edges[2:] - edges[:-2]))
    return filters


def _mel(hertz: float) -> float:
    return 15 + 27 / math.log(6.4) * math.log(hertz / 1000)
