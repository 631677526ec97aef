"""A Hugging Face checkpoint: a folder with config.json, safetensors files and a tokenizer."""

from __future__ import annotations

from pathlib import Path

from edge.errors import CheckpointError
from edge.models.families import read_family
from edge.text import read_end_ids, read_sampling, read_tokenizer_files
from edge.text.files import TOKENIZER, read_json
from edge.weights.foreign_folders import check_folder
from edge.weights.form import CheckpointForm, with_tied_head
from edge.weights.packed_encoding import packed_encoding
from edge.weights.packed_folder import packed_store
from offload import SafetensorsStore, StoreError

CONFIG = "config.json"


def open_folder(folder: Path) -> CheckpointForm:
    """Raises CheckpointError naming the file, what is wrong with it and what to do."""
    check_folder(folder)
    source = folder / CONFIG
    config = read_json(source)
    family, spec = read_family(config, source=str(source))
    end_ids, sampling = read_end_ids(folder), read_sampling(folder)
    name = with_tied_head(spec, family.tensor_name)
    try:
        files = SafetensorsStore(folder)
    except StoreError as error:
        raise CheckpointError(str(error)) from error
    try:
        store = packed_store(config, files, source=str(source), embedding=name("embedding"))
        own = packed_encoding(store, spec, name)
    except BaseException as error:
        files.close()
        if isinstance(error, StoreError):
            raise CheckpointError(str(error)) from error
        raise
    has_tokenizer = (folder / TOKENIZER).is_file()
    return CheckpointForm(
        path=folder,
        described_in=CONFIG,
        config=config,
        spec=spec,
        tensor_name=name,
        store=store,
        own_encoding=own,
        end_ids=end_ids,
        sampling=sampling,
        read_tokenizer=(lambda: read_tokenizer_files(folder)) if has_tokenizer else None,
    )
