"""A shard as ONNX graphs: how they are built, checked and fed, on every provider."""
