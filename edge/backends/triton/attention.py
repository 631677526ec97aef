"""Attention on a GPU: the product, rotation into the paged KV cache, attention, the product."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from edge.backends.triton.blocks import Cast, LayerBuilder, Norm
from edge.backends.triton.buffers import Lane
from edge.backends.triton.latent_attention import LatentAttentionBlock
from edge.backends.triton.paged_kv_cache import BlockCache
from edge.backends.triton.shared_keys import SharedKeysProduct
from edge.backends.triton.tuning import AttentionShape, Tuning
from edge.backends.triton.weights import Product
from edge.kernels.attention.triton import attention
from edge.kernels.rms_norm.triton import rms_norm
from edge.kernels.rope.triton import rope_store
from edge.models.attention import Attention


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """The attention of one layer. See Block."""

    layer: int
    part: Attention
    norm: Norm | Cast
    qkv: Product | SharedKeysProduct
    output: Product
    norms: tuple[Tensor, Tensor] | None
    """Norms of queries and of keys."""
    tables: tuple[Tensor, Tensor]
    sinks: Tensor | None
    cache: BlockCache
    epsilon: float
    tuning: Tuning

    @classmethod
    def of(
        cls, build: LayerBuilder, layer: int, part: Attention
    ) -> AttentionBlock | LatentAttentionBlock:
        if part.latent is not None:
            return LatentAttentionBlock.of(build, layer, part, part.latent)
        p = f"layers.{layer}."
        norms = None
        if part.query_key_norm or part.joint_norm:
            norms = build.vector(f"{p}query_norm"), build.vector(f"{p}key_norm")
        qkv: Product | SharedKeysProduct
        if part.keys_of is not None:
            qkv = SharedKeysProduct.of(build, layer, part.keys_of)
        else:
            qkv = build.product(f"{p}qkv")
        return cls(
            layer=layer,
            part=part,
            norm=build.norm(f"{p}attention_norm"),
            qkv=qkv,
            output=build.product(f"{p}output"),
            norms=norms,
            tables=build.tables[part.rotary],
            sinks=build.vector(f"{p}sinks") if part.has_sinks else None,
            cache=build.cache,
            epsilon=build.spec.norm_epsilon,
            tuning=build.tuning,
        )

    def launch(self, normed: Tensor, lane: Lane) -> None:
        if isinstance(self.qkv, SharedKeysProduct):
            qkv = self.qkv(normed, lane)
        else:
            qkv = self.qkv(normed)
        self.output(self.attend(qkv, lane), lane.partial)

    def attend(self, qkv: Tensor, lane: Lane) -> Tensor:
        """Rotate, store keys and values, attend: [rows, heads · head_size]."""
        layer = self.cache.layers[self.layer]
        norms = self.norms
        if norms is not None and self.part.joint_norm:
            first = 0
            for weight in norms:
                columns = qkv[:, first : first + weight.numel()]
                columns.copy_(rms_norm(columns.contiguous(), weight, epsilon=self.epsilon))
                first += weight.numel()
            norms = None
        query = rope_store(
            qkv,
            layer,
            *self.tables,
            positions=lane.positions,
            sequences=lane.sequences,
            interleaved=self.part.rotary.is_interleaved,
            gated=self.part.output_gate,
            norms=norms,
            value_norm=self.part.value_norm,
            epsilon=self.epsilon,
        )
        shape = AttentionShape(
            bits=layer.bits,
            queries=lane.num_tokens,
            group=query.shape[1] // layer.num_kv_heads,
            head_size=query.shape[2],
        )
        mixed = attention(
            query,
            layer,
            starts=lane.starts,
            lengths=lane.lengths,
            max_queries=lane.num_tokens,
            max_keys=lane.max_keys,
            scale=self.part.score_scale,
            window=self.part.window,
            soft_cap=self.part.soft_cap,
            sinks=self.sinks,
            tiles=self.tuning.attention(shape),
        )
        mixed = mixed.reshape(mixed.shape[0], -1)
        if self.part.output_gate:
            columns = mixed.shape[1]
            mixed.mul_(qkv[:, columns : 2 * columns].float().sigmoid_())
        return mixed
