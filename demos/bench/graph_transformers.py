"""Exports of models of transformers, small ones with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edge.demos.bench.graph_torch import Made, exported

_LAYERS = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
}  # fmt: skip


def _pictures(size: int = 64) -> dict[str, Any]:
    import torch

    return {"pixel_values": torch.randn(1, 3, size, size)}


def _tokens(length: int = 9, **others: Any) -> dict[str, Any]:
    import torch

    return {"input_ids": torch.randint(0, 40, (1, length)), **others}


def of_pictures() -> Iterator[Made]:
    import transformers as t

    stages = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2]}
    free = {"pixel_values": {0: "n"}}
    vit = t.ViTModel(t.ViTConfig(image_size=64, patch_size=16, **_LAYERS))
    yield "transformer", "vit", exported(vit, _pictures(), free), "pixel_values=2,3,64,64"
    resnet = t.ResNetForImageClassification(t.ResNetConfig(layer_type="basic", **stages))
    yield "cnn", "resnet", exported(resnet, _pictures(), free), "pixel_values=2,3,64,64"
    convnext = t.ConvNextForImageClassification(
        t.ConvNextConfig(hidden_sizes=[16, 32], depths=[2, 2], num_stages=2)
    )
    yield "cnn", "convnext", exported(convnext, _pictures(), new=True), ""
    yolos = t.YolosForObjectDetection(
        t.YolosConfig(image_size=[64, 64], num_detection_tokens=5, **_LAYERS)
    )

    def pick(out: Any) -> Any:
        return out.logits, out.pred_boxes

    yield "detection", "yolos", exported(yolos, _pictures(), pick=pick), ""
    detr = t.DetrForObjectDetection(
        t.DetrConfig(
            backbone_config=t.ResNetConfig(layer_type="basic", out_features=["stage2"], **stages),
            use_timm_backbone=False, use_pretrained_backbone=False, d_model=32, num_queries=5,
            encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
            encoder_attention_heads=2, decoder_attention_heads=2,
        )
    )  # fmt: skip
    yield "detection", "detr", exported(detr, _pictures(), pick=pick, new=True), ""
    segformer = t.SegformerForSemanticSegmentation(
        t.SegformerConfig(
            hidden_sizes=[16, 16, 32, 32], num_attention_heads=[1, 1, 2, 2], depths=[1, 1, 1, 1],
            decoder_hidden_size=32,
        )
    )  # fmt: skip
    free = {"pixel_values": {0: "n", 2: "h", 3: "w"}}
    yield (
        "segmentation", "segformer", exported(segformer, _pictures(), free),
        "pixel_values=1,3,96,64",
    )  # fmt: skip


def of_texts() -> Iterator[Made]:
    import torch
    import transformers as t

    free = {"input_ids": {0: "n", 1: "t"}, "attention_mask": {0: "n", 1: "t"}}
    mask = {"attention_mask": torch.ones(1, 9, dtype=torch.int64)}
    bert = t.BertModel(t.BertConfig(vocab_size=100, **_LAYERS))
    told = "input_ids=2,7 attention_mask=2,7"
    yield "transformer", "bert", exported(bert, _tokens(**mask), free), told
    config = t.T5Config(vocab_size=100, d_model=32, d_ff=64, d_kv=16, num_layers=2, num_heads=2)
    t5 = t.T5ForConditionalGeneration(config)
    yield "encoder-decoder", "t5-encoder", exported(t5.encoder, _tokens(), free), "input_ids=2,7"
    hidden = {"encoder_hidden_states": torch.randn(1, 7, 32)}
    free["encoder_hidden_states"] = {0: "n", 1: "s"}

    class Decoder(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.decoder, self.head = t5.decoder, t5.lm_head

        def forward(self, **given: Any) -> Any:
            return (self.head(self.decoder(use_cache=False, **given)[0]),)

    told = "input_ids=2,4 encoder_hidden_states=2,7,32"
    decoder = exported(Decoder(), _tokens(4, **hidden), free)
    yield "encoder-decoder", "t5-decoder", decoder, told
    gpt = t.GPT2Model(t.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, use_cache=False))
    yield "transformer", "gpt2", exported(gpt, _tokens(), new=True), ""


def of_sound() -> Iterator[Made]:
    import torch
    import transformers as t

    whisper = t.WhisperModel(
        t.WhisperConfig(
            vocab_size=100, d_model=32, encoder_layers=2, decoder_layers=2, num_mel_bins=20,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64,
            decoder_ffn_dim=64, max_source_positions=50, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, decoder_start_token_id=1,
        )
    )  # fmt: skip
    features = {"input_features": torch.randn(1, 20, 100)}
    yield "speech", "whisper-encoder", exported(whisper.encoder, features), ""
    heard = t.Wav2Vec2ForCTC(
        t.Wav2Vec2Config(
            vocab_size=40, conv_dim=[16] * 3, conv_stride=[5, 4, 4], conv_kernel=[10, 3, 3],
            num_feat_extract_layers=3, num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4, **_LAYERS,
        )
    )  # fmt: skip
    sound = {"input_values": torch.randn(1, 4000)}
    free = {"input_values": {0: "n", 1: "samples"}}
    yield "speech", "wav2vec2", exported(heard, sound, free), "input_values=1,5600"
