"""The families of models with towers: what `config.json` and the processor's settings make of them.

A family is a module here, and a line in the table.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from reprlib import repr as shown
from typing import Any

from edge.kernels.activation.reference import Activation
from edge.models.attention import Attention
from edge.models.config import Config
from edge.models.decoder import activation
from edge.models.pictures import MAX_PATCHES
from edge.models.rotary import NO_ROTARY
from edge.models.spec import MAX_LAYERS, FeedForward, LayerSpec, ModelSpec
from edge.models.towers.tower import CHANNELS, Tower

TOWERS: Mapping[str, str] = {
    "gemma3": "gemma3",
    "gemma4": "gemma4",
    "idefics3": "idefics3",
    "mistral3": "pixtral",
    "qwen2_5_vl": "qwen2_5",
    "qwen3_5": "qwen",
    "qwen3_5_moe": "qwen",
    "qwen3_vl": "qwen",
    "smolvlm": "idefics3",
}
"""Modules of this package by the `model_type` of the whole model."""

_INNER = "vision_model."
"""A part of names that only some files have."""

HALF = (0.5, 0.5, 0.5)
"""The usual mean and deviation of pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerFamily:
    """A family of towers: describe(config, processor, model) → Tower.

    names: names in the checkpoint by role, with `{}` for the number that the role then lacks (of a
    layer, or of a deep merger); matrices and biases have no ending. A name begins behind an
    optional `model.`. fused: as in Family. stacked: roles that are parts of another role's tensor,
    which is [parts, rows, columns]. is_bounded: a checkpoint may have the bounds of `Tower.bounds`.
    """

    describe: Callable[[Config, Config, ModelSpec], Tower]
    names: Mapping[str, str]
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_bounded: bool = False

    def tensor_name(self, present: Collection[str]) -> Callable[[str], str]:
        """The names of roles' tensors in a checkpoint with these tensors."""
        first = self.names["patches"]
        variants = [(model, part) for part in (_INNER, "") for model in ("model.", "")]
        prefix, inner = next(
            (v for v in variants if v[0] + first.replace(_INNER, v[1]) in present), variants[0]
        )

        def name(role: str) -> str:
            number = ""
            if role.startswith(("layers.", "deep.")):
                kind, number, role = role.split(".", 2)
                role = f"{kind}.{role}"
            base, dot, ending = role, "", ""
            if role not in self.names:
                base, dot, ending = role.rpartition(".")
            found = f"{self.names[base]}{dot}{ending}".format(number)
            return prefix + found.replace(_INNER, inner)

        return name


def read_tower(
    values: Mapping[str, Any], processor: Mapping[str, Any], model: ModelSpec, *, source: str
) -> tuple[TowerFamily, Tower] | None:
    """The tower of a configuration; None for text models, and for towers that are not known.

    processor: the settings of its image processor. Raises CheckpointError for invalid values.
    """
    name = values.get("model_type")
    module = TOWERS.get(name) if isinstance(name, str) else None
    if module is None or values.get("vision_config") is None:
        return None
    family: TowerFamily = importlib.import_module(f"edge.models.towers.{module}").FAMILY
    config = Config(values, source=source)
    try:
        tower = family.describe(config, Config(processor, source=source), model)
    except ValueError as error:
        raise config.error(str(error)) from error
    except ArithmeticError as error:
        raise config.error("it has numbers that nothing can be computed with") from error
    return family, tower


def vision_of(config: Config) -> Config:
    """The values of the tower."""
    return Config(config.mapping("vision_config"), source=f"{config.source}: vision_config")


def square(config: Config, name: str, *usual: int, most: int = 1 << 14) -> int:
    """A size that a file may also have for height and width, which are equal."""
    value = config.values.get(name)
    if isinstance(value, list) and len(set(map(repr, value))) == 1:
        config = config.changed(**{name: value[0]})
    return config.size(name, *usual, most=most)


def angle_base(vision: Config, usual: float = 10_000.0) -> float:
    """The base of rotary frequencies on two axes."""
    rope = Config(vision.mapping("rope_parameters"), source=f"{vision.source}: rope_parameters")
    kind = rope.values.get("rope_type")
    if kind not in (None, "axial", "default"):
        raise rope.error(f"rope_type {shown(kind)} of a tower is not supported")
    return rope.positive("rope_theta", vision.number("rope_theta", usual))


def pixel_terms(
    processor: Config,
    *,
    mean: tuple[float, ...] = HALF,
    deviation: tuple[float, ...] = HALF,
    normalized: bool = True,
) -> dict[str, Any]:
    """`pixel_scale` and `pixel_shift` by a processor's settings. Arguments: its defaults."""

    def three(name: str, usual: tuple[float, ...]) -> tuple[float, ...]:
        value = processor.values.get(name)
        if value is None:
            return usual
        if not isinstance(value, list) or len(value) != CHANNELS:
            raise processor.error(f"{name} must be {CHANNELS} numbers")
        each = (Config({name: number}, source=processor.source) for number in value)
        return tuple(one.number(name) for one in each)

    factor = processor.positive("rescale_factor", 1 / 255)
    factor = factor if processor.flag("do_rescale", True) else 1.0
    middle, spread = (0.0,) * CHANNELS, (1.0,) * CHANNELS
    if processor.flag("do_normalize", normalized):
        middle, spread = three("image_mean", mean), three("image_std", deviation)
    if min(spread) <= 0:
        raise processor.error("image_std must be above 0")
    return {
        "pixel_scale": tuple(factor / each for each in spread),
        "pixel_shift": tuple(-m / s for m, s in zip(middle, spread, strict=True)),
    }


def encoder(
    vision: Config,
    feed_forward: FeedForward,
    *,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    epsilon: float,
    **attention: Any,
) -> ModelSpec:
    """The layers of a tower. attention: fields that differ from those of plain attention."""
    if hidden_size % num_heads and "head_size" not in attention:
        raise vision.error(f"hidden_size ({hidden_size}) must be a multiple of {num_heads} heads")
    facts: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_size": hidden_size // num_heads,
        "rotary": NO_ROTARY,
        "window": None,
        "qkv_bias": False,
        "output_bias": False,
        "query_key_norm": False,
        **attention,
    }
    if not 0 < num_layers <= MAX_LAYERS:
        raise vision.error(f"a tower has 1 to {MAX_LAYERS} layers")
    return ModelSpec(
        family="tower",
        hidden_size=hidden_size,
        vocab_size=1,
        context_tokens=MAX_PATCHES,
        norm_epsilon=epsilon,
        tied_embeddings=False,
        kinds=(LayerSpec(mixer=Attention(**facts), feed_forward=feed_forward),),
        layers=(0,) * num_layers,
    )


def vision_activation(vision: Config, usual: str, name: str = "hidden_act") -> Activation:
    return activation(vision, name, usual)
