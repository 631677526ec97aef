"""Small random checkpoints of every family, and what `transformers` makes of them.

Every weight matters: norms and biases are random too, and matrices are scaled so that activations
and logits stay near 1. Their sizes are in `family_sizes`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edge.models.families import Family, llama_tensor_name, read_family
from edge.models.linear_attention import LinearAttention
from edge.models.spec import ModelSpec, tensor_shapes
from tests.support.family_sizes import SHARED, SIZES, WITH_PICTURES

_SEED = 10
"""With this one greedy tokens vary and none is a near tie; a test of them says so."""

hub: Any = transformers
"""The same module; parts of it carry no types."""

hub.utils.logging.disable_progress_bar()
# Models this small gain nothing from a second thread, and waiting for it costs where cores are few.
torch.set_num_threads(1)

PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}
"""Of `transformers`: attention by its formula, and one expert after the other."""

_BUFFERS = ("e_score_correction_bias", "expert_bias", "layer_scalar")
"""Weights that are no parameters."""

_NOT_OF_LLAMA = {
    "attention_norm_bias": "input_layernorm.bias",
    "mlp_norm_bias": "post_attention_layernorm.bias",
    "query_down": "self_attn.q_a_proj",
    "query_latent_norm": "self_attn.q_a_layernorm.weight",
    "query_up": "self_attn.q_b_proj",
    "kv_down": "self_attn.kv_a_proj",
    "kv_latent_norm": "self_attn.kv_a_layernorm.weight",
    "key_value": "self_attn.kv_b_proj",
    "expert_scales": "mlp.gate.per_expert_scale",
    "router_norm": "router_norm.weight",
    "experts_norm": "experts_norm.weight",
    "experts_post_norm": "experts_post_norm.weight",
    "shared_post_norm": "shared_post_norm.weight",
    "positions": "model.embed_positions.weight",
    "final_norm_bias": "model.norm.bias",
    "token_table": "token_table",
    "token_projection": "token_projection.weight",
    "token_norm": "token_norm",
    "token_gate": "token_gate",
    "token_output": "token_output",
    "token_post_norm": "token_post_norm.weight",
}
"""What Llama's checkpoints would call weights that they have not."""

StoredType = Literal["float32", "bfloat16", "float16"]


class TinyCheckpoint:
    """A checkpoint on disk and the answers of `transformers` in float32, kept once computed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._answers: dict[tuple[int, ...], list[int]] = {}
        """By prompt, the longest so far: shorter ones begin it."""

    @functools.cached_property
    def spec(self) -> ModelSpec:
        config = json.loads((self.path / "config.json").read_text())
        return read_family(config, source=str(self.path))[1]

    @functools.cached_property
    def model(self) -> Any:
        """As plain as it comes, masks included."""
        has_pictures = self.path.name in WITH_PICTURES
        kind = hub.AutoModelForImageTextToText if has_pictures else hub.AutoModelForCausalLM
        model = kind.from_pretrained(self.path, dtype=torch.float32, **PLAIN)
        return model.eval()

    @functools.cached_property
    def weights(self) -> dict[str, NDArray[np.float32]]:
        """Every tensor by its name in the file, widened to float32."""
        return {
            name: tensor.detach().to(torch.float32).numpy()
            for name, tensor in self.model.state_dict().items()
        }

    @functools.cached_property
    def _of_file(self) -> dict[str, NDArray[np.float32]]:
        found: dict[str, NDArray[np.float32]] = {}
        for file in self.path.glob("*.safetensors"):
            found |= {name: each.float().numpy() for name, each in load_file(file).items()}
        return found

    @functools.cached_property
    def llama_weights(self) -> dict[str, NDArray[np.float32]]:
        """Every tensor as Llama's checkpoints would have it, by the names there.

        Fused matrices are taken apart, and norms that are stored as 1 less have their weights.
        """
        config = json.loads((self.path / "config.json").read_text())
        family, spec = read_family(config, source=str(self.path))
        found: dict[str, NDArray[np.float32]] = {}
        for role in tensor_shapes(spec):
            values = self._weight(family, spec, role)
            name = _llama_name(role)
            offset = family.norm_offset if role.endswith("norm") else 0.0
            found[name] = values + np.float32(offset) if offset else values
        return found

    def _weight(self, family: Family, spec: ModelSpec, role: str) -> NDArray[np.float32]:
        name = family.tensor_name(role)
        if name in self.weights:
            return self.weights[name]
        if family.turned:
            return self._of_columns(family, spec, role)
        by_head = [each for parts in family.fused_by_head.values() for each in parts]
        if role.split(".")[2] in by_head:
            return self._of_heads(spec, role)
        if family.turned_experts and ".experts." in name:
            return self._of_turned(role)
        if ".experts." in name and name not in self._of_file:
            return self._of_stacked(family, spec, role)
        if ".experts." in name or ".router." in role:  # modules have those of a layer in one
            return self._of_file[name]
        _layers, number, part, suffix = role.split(".")
        (fused, parts), *_ = (each for each in family.fused.items() if part in each[1])
        shapes = tensor_shapes(spec)
        heights = [shapes[f"layers.{number}.{each}.{suffix}"][0] for each in parts]
        whole = self.weights[f"model.layers.{number}.{fused}.{suffix}"]
        return np.split(whole, np.cumsum(heights)[:-1])[parts.index(part)]

    def _of_heads(self, spec: ModelSpec, role: str) -> NDArray[np.float32]:
        """As `fix_query_key_value_ordering` of Qwen3-Next takes them apart."""
        _layers, number, part, _weight = role.split(".")
        mixer = spec.layer(int(number)).mixer
        assert isinstance(mixer, LinearAttention)
        prefix = f"model.layers.{number}.linear_attn.in_proj_"
        keys, values = mixer.key_size, mixer.value_heads * mixer.value_size
        rows = {"query": keys, "key": keys, "value": values, "gate": values}
        name = "qkvz"
        if part in ("linear_beta", "linear_decay"):
            name, rows = "ba", dict.fromkeys(("beta", "decay"), mixer.value_heads)
        whole = self.weights[f"{prefix}{name}.weight"]
        heads = whole.reshape(mixer.num_key_heads, -1, spec.hidden_size)
        parts = np.split(heads, np.cumsum([*rows.values()])[:-1], axis=1)
        found = parts[[*rows].index(part.removeprefix("linear_"))]
        return found.reshape(-1, spec.hidden_size)

    def _of_stacked(self, family: Family, spec: ModelSpec, role: str) -> NDArray[np.float32]:
        """Where files, too, have those of a layer in one."""
        _layers, layer, _experts, number, part, _weight = role.split(".")
        (fused, parts), *_ = (each for each in family.stacked_experts.items() if part in each[1])
        shapes = tensor_shapes(spec)
        heights = [shapes[f"layers.{layer}.experts.0.{each}.weight"][0] for each in parts]
        whole = self.weights[f"model.layers.{layer}.{fused}"][int(number)]
        return np.split(whole, np.cumsum(heights)[:-1])[parts.index(part)]

    def _of_columns(self, family: Family, spec: ModelSpec, role: str) -> NDArray[np.float32]:
        """As `Conv1D` multiplies with them."""
        _layers, number, part, suffix = role.split(".")
        (fused, parts), *_ = (each for each in family.turned.items() if part in each[1])
        shapes = tensor_shapes(spec)
        heights = [shapes[f"layers.{number}.{each}.{suffix}"][0] for each in parts]
        whole = self.weights[f"transformer.h.{number}.{fused}.{suffix}"].T
        return np.split(whole, np.cumsum(heights)[:-1])[parts.index(part)]

    def _of_turned(self, role: str) -> NDArray[np.float32]:
        """As `GptOssExperts` multiplies with them."""
        _layers, layer, _experts, number, part, suffix = role.split(".")
        name = "down_proj" if part == "down" else "gate_up_proj"
        name += "_bias" if suffix == "bias" else ""
        whole = self.weights[f"model.layers.{layer}.mlp.experts.{name}"][int(number)]
        if part != "down":
            whole = whole[..., ("gate", "up").index(part) :: 2]
        return np.ascontiguousarray(whole.T)

    def prompt(self, length: int) -> list[int]:
        """Token ids that look random and are always the same."""
        ids = _generator(self.path.name, length).integers(self.spec.vocab_size, size=length)
        return [int(token) for token in ids]

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """[tokens, vocab], all tokens in one forward pass without a cache."""
        return self._logits(tuple(tokens))

    def states(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """The last hidden state [tokens, hidden], likewise."""
        with torch.inference_mode():
            output = self.model.base_model(torch.tensor([list(tokens)]), use_cache=False)
        array: NDArray[np.float32] = output.last_hidden_state[0].numpy()
        return array

    def check_greedy(self, prompt: Sequence[int], tokens: Sequence[int], count: int) -> None:
        """Asserts that these are the `count` tokens that `greedy` gives, without making them.

        They are if each is the likeliest behind those before it: one forward pass of them all.
        """
        likeliest = self.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :].argmax(axis=-1)
        assert list(tokens) == likeliest.tolist()
        assert len(tokens) == count

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that `generate` appends to the prompt."""
        known = self._answers.get(tuple(prompt), [])
        if len(known) < count:
            known = self._answers[tuple(prompt)] = self._generated(prompt, count)
        return known[:count]

    @functools.cache  # noqa: B019 - checkpoints live as long as the test session
    def _logits(self, tokens: tuple[int, ...]) -> NDArray[np.float32]:
        with torch.inference_mode():
            output = self.model(torch.tensor([tokens]), use_cache=False)
        array: NDArray[np.float32] = output.logits[0].numpy()
        return array

    def _generated(self, prompt: Sequence[int], count: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens


def make_checkpoint(
    folder: Path,
    name: str,
    *,
    stored_type: StoredType = "float32",
    file_size: str | None = None,
    layers: int | None = None,
    heads: tuple[int, int] | None = None,
    context_tokens: int | None = None,
) -> TinyCheckpoint:
    """Write the model called `name` in one of the tables above into `folder`.

    `file_size` ("100KB") cuts the weights into several files with an index. `layers`: fewer than
    usual, where each takes its time; half of them keep a window if some would. `heads`: query and
    KV heads, likewise: interpreted kernels run a program for each head of each token.
    `context_tokens`: more than usual.
    """
    pictures = WITH_PICTURES.get(name)
    text = name if pictures is None else pictures[1]
    model_type, sizes = SIZES[text]
    if pictures is not None:
        text_config = {"model_type": model_type, **SHARED, **sizes}
        model_type, sizes = pictures[0], {"text_config": text_config, **pictures[2]}
    if layers is not None:
        fewer = {
            "num_hidden_layers": layers,
            "n_layer": layers,
            "max_window_layers": layers // 2,
            "num_kv_shared_layers": max(0, layers - 4),  # behind one of each kind
        }
        sizes = {**sizes, **{key: value for key, value in fewer.items() if key in sizes}}
        listed = {key for key in ("layer_types", "no_rope_layers") if key in sizes}
        sizes = {**sizes, **{key: sizes[key][:layers] for key in listed}}
    if heads is not None:
        sizes = {**sizes, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    if context_tokens is not None:
        sizes = {**sizes, "max_position_embeddings": context_tokens}
    config = hub.AutoConfig.for_model(model_type, **{**SHARED, **sizes})
    kind = hub.AutoModelForImageTextToText if pictures else hub.AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        corrections = [each for each in model.named_buffers() if each[0].endswith(_BUFFERS)]
        for parameter_name, parameter in (*model.named_parameters(), *corrections):
            values = random_weight(parameter_name, tuple(parameter.shape), name)
            parameter.copy_(torch.from_numpy(values))
    model = model.to(getattr(torch, stored_type))
    folder.mkdir(parents=True, exist_ok=True)
    limits = {} if file_size is None else {"max_shard_size": file_size}
    model.save_pretrained(folder, **limits)
    write_tokenizer(folder)
    return TinyCheckpoint(folder)


def _llama_name(role: str) -> str:
    place = 2 if role.startswith("layers.") else 0
    parts = role.split(".")
    name = _NOT_OF_LLAMA.get(parts[place])
    if name is None:
        return llama_tensor_name(role)
    return ".".join([*(["model", *parts[:2]] if place else []), name, *parts[place + 1 :]])


def write_tokenizer(folder: Path) -> None:
    """One token per printable ASCII character: 95 ids, below every vocabulary here."""
    characters = ["Ġ", *(chr(code) for code in range(0x21, 0x7F))]
    tokenizer = Tokenizer(
        models.BPE(vocab={text: place for place, text in enumerate(characters)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )


def random_weight(name: str, shape: tuple[int, ...], model: str) -> NDArray[np.float32]:
    normal = _generator(_SEED, model, name).standard_normal(shape)
    if name.endswith("bias"):
        values = 0.15 * normal
    elif name.endswith("A_log"):  # from hardly anything that is forgotten to nearly all
        values = normal - 1.0
    elif len(shape) == 1:
        values = 1.0 + 0.3 * normal
        if model.startswith("gemma4") and name.endswith("q_norm.weight"):
            values *= 1.5 * shape[0] ** -0.5  # scores have no scale besides
    else:
        values = normal * shape[2 if len(shape) == 3 else 1] ** -0.5
    return values.astype(np.float32)


def _generator(*seed: object) -> np.random.Generator:
    return np.random.default_rng(list(repr(seed).encode()))
