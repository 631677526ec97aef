"""Descriptions of hybrid decoders with mostly linear attention: Qwen's from Qwen3-Next on.

The other layers are attention with gated outputs. The layers for multi-token prediction in
checkpoints are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge.models.config import Config
from edge.models.decoder import GLOBAL, decoder, head_size_of, num_layers
from edge.models.linear_attention import LinearAttention
from edge.models.rope import read_rotary
from edge.models.spec import MAX_LAYERS, FeedForward, ModelSpec

_LINEAR = "linear_attention"
_PATTERN = 4
"""The default interval of layers with full attention."""
_HEAD_SIZE = 256


def delta_decoder(
    config: Config, *, family: str, feed_forwards: Sequence[FeedForward | None] | None = None
) -> ModelSpec:
    """A hybrid decoder. feed_forwards: as for `decoder`."""
    config = config.filled({"hidden_act": "silu", "max_position_embeddings": 32768})
    if config.values["hidden_act"] not in ("silu", "swish"):
        raise config.error("hidden_act must be silu: the convolution's is the same")
    count = num_layers(config)
    linear = LinearAttention(
        num_key_heads=config.size("linear_num_key_heads", 16),
        num_value_heads=config.size("linear_num_value_heads", 32),
        key_size=config.size("linear_key_head_dim", 128),
        value_size=config.size("linear_value_head_dim", 128),
        convolution=config.size("linear_conv_kernel_dim", 4),
    )
    head_size = head_size_of(config, _HEAD_SIZE)
    return decoder(
        config,
        family=family,
        head_size=head_size,
        rotaries=(read_rotary(config, head_size, partial=0.25, alternates_axes=True),) * count,
        mlp_bias=False,
        mixer={"query_key_norm": True, "output_gate": True},
        mixers=[linear if kind == _LINEAR else None for kind in _kinds(config)],
        feed_forwards=feed_forwards,
    )


def _kinds(config: Config) -> Sequence[str]:
    """The kind of each layer."""
    count = num_layers(config)
    kinds = config.values.get("layer_types")
    if kinds is None:
        pattern = config.size("full_attention_interval", _PATTERN, most=MAX_LAYERS)
        return [GLOBAL if not (number + 1) % pattern else _LINEAR for number in range(count)]
    known = (_LINEAR, GLOBAL)
    if not isinstance(kinds, list) or len(kinds) != count or any(k not in known for k in kinds):
        raise config.error(f"layer_types must name one of {list(known)} for each layer")
    return kinds
