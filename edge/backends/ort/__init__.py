"""CPU peers: a shard as ONNX Runtime sessions."""
