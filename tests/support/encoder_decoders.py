"""Small encoder–decoder models with random weights, exported in the layout that optimum writes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
from transformers.modeling_outputs import BaseModelOutput

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
