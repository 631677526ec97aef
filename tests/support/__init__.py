"""Helpers of tests, by what a test needs. A first test needs none, or one of the first ten.

Peers, and what they compute
    `null_peers`          daemons of this process that compute nothing, and a model on them
    `processes`           real daemons and command lines; waits for a condition; keys of this run
    `wrong_peer`          a daemon whose products of 4 bits are wrong
    `lost_adapter`        a daemon whose graphics adapter is lost
    `scripted_peers`      peers that do as a test says; a sink for answers
    `scheduling`          decisions of the scheduler, without peers
    `scripted_models`     a server whose model says what a test says, without a network
    `checkpoints`         tiny random checkpoints of every family, and transformers on them
    `specs`               models that are sizes alone
    `plans`               plans written by hand
    `passing_time`        a clock that a test moves; long limits for tests with daemons
    `slow_cases`          marks of slow cases
Descriptions without the thing
    `peer_infos`, `facts`, `formats`, `known_rates`, `members`, `kept_journals`
Models and texts
    `family_sizes`, `model_folders`, `small_tokenizers`, `call_templates`, `lora_adapters`,
    `packed_folders`, `quantized`, `further_heads`, `small_pictures`
    GGUF: `gguf_files`, `shaped_files`, `gguf_bytes`, `gguf_tensors`, `gguf_kinds`, `mmproj_files`
    `small_graphs`        ONNX graphs of several kinds, their parts, and what ONNX Runtime computes
    `towers`              tiny models that read pictures, and transformers on a tile
    `seeing_models`       the same, and transformers on a prompt with tiles
Results to compare with
    `reference_model`, `operator_face`, `block_rows`, `program_contract`, `replies`
Shards of a stage in this process, or as a script in one of its own
    `linked_shards`, `halves`, `stacked_experts`, `many_places`, `shards`, `streamed_extents`,
    `moved_caches`
GPU kernels without a GPU; import these first
    `triton_face`, `triton_kv`, `triton_shards`, `triton_compiler`, `gpu_weights`,
    `device_groups`, `quick_interpreter`; a graphics adapter in software: `swiftshader`
Connections, disks, terminals
    `transport_pairs`, `answering`, `small_disk`, `terminal`
Hostile input, which `scripts/fuzz-*` tries for longer
    `mutated_files`, `mutated_frames`, `hostile_talks`, `fuzzed_server`, `coverage_guided`,
    `kept_inputs`, `small_files`
Machinery that no test imports
    `forked`, `quality_picture`, `recorded_session`, `reference_page`
"""
