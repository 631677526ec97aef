"""Files that nobody wrote: one of every kind that is read, changed in its structure or its bytes.

`python -m tests.support.mutated_files 100000 --seed 7` tries that many.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import gc
import itertools
import json
import os
import random
import re
import resource
import shutil
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from edge import partition
from edge.answers.journal_folder import JournalFolder
from edge.cli.options import read_plan
from edge.errors import CheckpointError
from edge.membership.identity import Identity
from edge.membership.membership import Expelled
from edge.membership.store import MembershipStore, enrolled_by_token, token
from edge.models.experts import Experts
from edge.models.spec import LayerSpec
from edge.offload import (
    CachedShard,
    DerivedCache,
    Manifest,
    ManifestBuilder,
    PrefixPart,
    PrefixStore,
    ShardCache,
)
from edge.planning.profile_cache import FactsCache
from edge.protocol.fields import to_json
from edge.protocol.measurements import LinkGlance, LinkTimes, Span
from edge.text import Tokenizer, read_tokenizer_files
from edge.text.chat_template import ChatTemplate
from edge.text.tokenizer_facts import describe_tokenizer
from edge.weights.checkpoint import Checkpoint
from edge.weights.expert_uses import keep_expert_uses, known_expert_uses
from edge.weights.formats import weight_format
from edge.weights.packed.block_matrix import BlockMatrix
from edge.weights.packed.folder import PackedStore
from edge.weights.packed.matrix import CodedMatrix
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_kinds import gguf_kinds
from tests.support.kept_inputs import Target, kept
from tests.support.kept_journals import journal_of
from tests.support.members import Kept
from tests.support.mutated_frames import mutated, mutated_bytes
from tests.support.packed_folders import (
    Layout,
    awq,
    compressed,
    edge_blocks,
    fp8,
    gptq,
    mlx,
    write_packed,
)
from tests.support.peer_infos import peer_info
from tests.support.small_files import REFUSALS, Kind, readers_alone, replaced, small_files, told
from tests.support.small_tokenizers import CHAT_TEMPLATE, byte_level, write_checkpoint
from tests.support.specs import plain_layer, spec_of

_MOST_TOLD = 4000

_SMALL_BYTES = 1 << 10
"""What is larger than that is chosen less often, as it takes longer."""

_TEMPLATES_OF_A_PROCESS = 2000
"""A checkpoint has a few, and a process for each."""

_MOST_S, _MOST_BYTES = 20.0, 1 << 30
"""That a file may take of time, and of memory beside what is there at first, here and in the
processes that render templates: hundreds of times what the slowest takes where nothing else runs.
A file has hundreds of KiB."""


class Files:
    """One of every kind, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._template, self._rendered = ChatTemplate("", "it"), 0
        self.kinds: Mapping[str, Kind] = {
            **self._checkpoints(folder / "checkpoint"),
            **self._tokenizers(folder / "tokenizer"),
            **gguf_kinds(folder / "gguf"),
            **self._packed(folder / "packed"),
            **self._caches(folder / "caches"),
            **self._memberships(folder / "keys"),
            **small_files(folder / "small"),
            **readers_alone(folder / "alone"),
            "reply": self._reply(folder / "replies"),
            "lines of a reply": self._lines_of_a_reply(folder / "lines"),
            "plan": Kind(_plan(), self._read_plan),
            "template": Kind(CHAT_TEMPLATE.encode(), self._render),
        }
        self.kept = kept("files", self.kinds)
        self._begun_with: dict[str, tuple[Sequence[bytes], Sequence[float]]] = {}

    def try_one(self, seed: int) -> str:
        """What became of one changed file: see `outcome`."""
        chance = random.Random(seed)
        name = chance.choice(tuple(self.kinds))
        known, small_first = self._known(name)
        (content,) = chance.choices(known, cum_weights=small_first)
        return self.outcome(name, changed(content, chance))

    def outcome(self, name: str, content: bytes) -> str:
        """What becomes of one with this content: its kind, and "read" or "refused"."""
        try:
            self.kinds[name].read(content)
        except REFUSALS as error:
            return f"{name} refused" if len(str(error)) < _MOST_TOLD else f"{name} told at length"
        return f"{name} read"

    def _known(self, name: str) -> tuple[Sequence[bytes], Sequence[float]]:
        """The sound ones, and those worth keeping; how often each is chosen, summed up."""
        if name not in self._begun_with:
            kind = self.kinds[name]
            known = [kind.sound, *kind.others, *(each for of, each in self.kept if of == name)]
            small_first = itertools.accumulate(1 / (_SMALL_BYTES + len(each)) for each in known)
            self._begun_with[name] = known, list(small_first)
        return self._begun_with[name]

    def _checkpoints(self, folder: Path) -> dict[str, Kind]:
        model = Path(__file__).parents[2] / "demos" / "model"
        shutil.copytree(model, folder / "whole")
        weights = (folder / "whole" / "model.safetensors").read_bytes()
        (folder / "whole" / "model.safetensors").unlink()
        size = 8 + int.from_bytes(weights[:8], "little")

        def open_with(name: str) -> Callable[[bytes], None]:
            def read(content: bytes) -> None:
                with replaced(folder / "whole" / name, content):
                    told(folder / "whole")
                    Checkpoint.open(folder / "whole").close()

            return read

        def open_header(header: bytes) -> None:
            """With the length that it has; what follows is cut or filled as the file was."""
            length = len(header).to_bytes(8, "little")
            open_with("model.safetensors")(length + header + weights[size:])

        def open_front(front: bytes) -> None:
            """Most of the weights stay as they are."""
            open_with("model.safetensors")(front + weights[size + 64 :])

        names = [name for name in json.loads(weights[8:size]) if name != "__metadata__"]
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, "a.safetensors")}
        shutil.copytree(folder / "whole", folder / "parts")
        (folder / "parts" / "a.safetensors").write_bytes(weights)
        (folder / "whole" / "model.safetensors").write_bytes(weights)

        def open_index(content: bytes) -> None:
            (folder / "parts" / "model.safetensors.index.json").write_bytes(content)
            told(folder / "parts")
            Checkpoint.open(folder / "parts").close()

        whole = folder / "whole"
        return {
            "safetensors": Kind(weights[: size + 64], open_front),
            "safetensors header": Kind(weights[8:size], open_header),
            "index": Kind(json.dumps(index).encode(), open_index),
            **{
                name: Kind((whole / name).read_bytes(), open_with(name))
                for name in ("config.json", "generation_config.json")
            },
        }

    def _tokenizers(self, folder: Path) -> dict[str, Kind]:
        settings = {"bos_token": "<|begin|>", "chat_template": CHAT_TEMPLATE}
        write_checkpoint(
            folder, byte_level(), settings, special_tokens_map={"eos_token": "<|end|>"}
        )

        def open_with(name: str) -> Kind:
            def read(content: bytes) -> None:
                with replaced(folder / name, content):
                    with contextlib.suppress(CheckpointError):
                        describe_tokenizer(read_tokenizer_files(folder), (0, 1))
                    opened = Tokenizer.open(folder)
                    opened.decode(opened.encode("The quick brown fox"))

            return Kind((folder / name).read_bytes(), read)

        names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
        return {name: open_with(name) for name in names}

    def _packed(self, folder: Path) -> dict[str, Kind]:
        """Of each layout of quantised folders, the configuration and the header of the weights."""
        made = make_checkpoint(folder / "made", "qwen2_in_blocks", layers=1).path
        layouts = {
            "gptq": gptq(symmetric=False),
            "gptq in act-order": gptq(act_order=True),
            "awq": awq(),
            "compressed-tensors": compressed(symmetric=False),
            "fp8": fp8(),
            "mlx": mlx(),
            "edge-blocks": edge_blocks("Q4_K"),
        }
        return {
            name: kind
            for layout, each in layouts.items()
            for name, kind in self._packed_kinds(folder, made, layout, each).items()
        }

    def _packed_kinds(self, folder: Path, made: Path, name: str, layout: Layout) -> dict[str, Kind]:
        path = folder / name
        write_packed(path, made, layout)
        weights = (path / "model.safetensors").read_bytes()
        size = 8 + int.from_bytes(weights[:8], "little")

        def read() -> None:
            with Checkpoint.open(path) as opened:
                for tensor in opened.store.names():
                    opened.store.read(tensor, rows=range(min(3, opened.store.shape(tensor)[0])))
                weight_format(opened.spec, "auto", own=opened.own_encoding)
                if isinstance(opened.store, PackedStore):
                    for matrix in opened.store.packed.values():
                        if isinstance(matrix, CodedMatrix):
                            rows, columns = matrix.shape
                            some = range(rows // 2, rows), range(columns // 3, columns)
                            matrix.blocks(*some)
                            if isinstance(matrix, BlockMatrix):
                                matrix.own.of_parts(matrix.parts(*some), len(some[0]), columns)

        def read_config(content: bytes) -> None:
            with replaced(path / "config.json", content):
                read()

        def read_header(header: bytes) -> None:
            length = len(header).to_bytes(8, "little")
            with replaced(path / "model.safetensors", length + header + weights[size:]):
                read()

        def read_weights(content: bytes) -> None:
            with replaced(path / "model.safetensors", weights[:size] + content):
                read()

        return {
            f"{name} config": Kind((path / "config.json").read_bytes(), read_config),
            f"{name} header": Kind(weights[8:size], read_header),
            f"{name} weights": Kind(weights[size:], read_weights),
        }

    def _caches(self, folder: Path) -> dict[str, Kind]:
        builder = ManifestBuilder()
        content = {name: np.full(300, number, np.uint8) for number, name in enumerate("abc")}
        for name, array in content.items():
            builder.add(name, array)
        manifest = builder.build()
        shards, derived = ShardCache(folder / "shards", 1 << 20), folder / "derived"
        writer = shards.begin(manifest)
        assert not hasattr(writer, "path")
        for name, array in content.items():
            (entry,) = (each for each in manifest.tensors if each.name == name)
            writer.put(entry.pieces[0].digest, array.tobytes())
        writer.finish().close()
        shard = folder / "shards" / manifest.digest
        with DerivedCache(derived, 1 << 20).begin("key", 1 << 10) as made:
            for name, array in content.items():
                made.add(name, array)
            made.finish().close()
        (packed,) = (path for path in derived.iterdir() if path.is_dir())

        def check_content(found: CachedShard | None) -> None:
            """Tensors are as they were, or there are none; what lies between them nobody reads."""
            if found is None:
                return
            with found:
                weights = found.path.read_bytes()
                for entry in manifest.tensors:
                    place = slice(entry.offset, entry.offset + entry.nbytes)
                    assert weights[place] == content[entry.name].tobytes()

        unchanged_shard, unchanged_packed = as_before(shard), as_before(packed)

        def in_shard(name: str) -> Kind:
            def read(changed: bytes) -> None:
                with unchanged_shard:
                    (shard / name).write_bytes(changed)
                    found = shards.get(manifest.digest)
                    check_content(found)

            return Kind((shard / name).read_bytes(), read)

        def in_packed(name: str) -> Kind:
            def read(changed: bytes) -> None:
                with unchanged_packed:
                    (packed / name).write_bytes(changed)
                    found = DerivedCache(derived, 1 << 20).get("key")
                    check_content(found)

            return Kind((packed / name).read_bytes(), read)

        key, secret, block = "0" * 64, bytes(32), np.arange(50, dtype=np.float32)
        pieces: dict[str, np.ndarray] = {"a": block, "b": block[:5]}
        assert PrefixStore(folder / "prefixes", 1 << 20).put(key, pieces, secret)
        (record,) = (folder / "prefixes").iterdir()

        def get_block(changed: bytes) -> None:
            record.write_bytes(changed)
            store = PrefixStore(folder / "prefixes", 1 << 20)
            into = np.zeros_like(block)
            if store.read(store.find(key, PrefixPart.of("a"), secret), {"a": into}, secret):
                assert np.array_equal(into, block)

        facts = FactsCache(folder / "facts")
        ends = peer_info("a"), peer_info("b")
        span = Span(low_s=1e-4, middle_s=2e-4, high_s=3e-4)
        glance = LinkGlance(echo_s=span, there_s=span, back_s=span)
        times = LinkTimes(
            latency_s=1e-4, there_bytes_per_s=1e8, back_bytes_per_s=2e8, glance=glance
        )
        facts.keep_link(*ends, times)
        (link,) = (folder / "facts" / "links").iterdir()

        def get_link(changed: bytes) -> None:
            with replaced(link, changed):
                facts.link(*ends)

        keep_expert_uses(folder, "counted", SPARSE_COUNTS)
        (uses,) = folder.rglob("counted.json")

        def get_uses(changed: bytes) -> None:
            with replaced(uses, changed):
                found = known_expert_uses(folder, "counted", SPARSE)
            # As facts of a model they are checked once more.
            assert not found or all(0 <= each <= 1 for layer in found for each in layer)

        return {
            "cached uses of experts": Kind(uses.read_bytes(), get_uses),
            "manifest": Kind(manifest.to_json().encode(), lambda text: Manifest.from_json(text)),
            "cached manifest": in_shard("manifest.json"),
            "mark of a shard": in_shard("intact"),
            "cached weights": in_shard("weights"),
            "packed manifest": in_packed("manifest.json"),
            "packed weights": in_packed("weights"),
            "prefix": Kind(record.read_bytes(), get_block),
            "link": Kind(link.read_bytes(), get_link),
        }

    def _memberships(self, folder: Path) -> dict[str, Kind]:
        store = MembershipStore(folder)
        attic = Kept(store.founded("attic"))
        kitchen = attic.taking_in("kitchen").membership
        rotation = attic.rotate()
        attic.taking_in("cellar")
        founded = attic.membership.expelling("a" * 32)
        store.keep(founded)
        identity = Identity.made()

        def open_with(name: str) -> Kind:
            def read(content: bytes) -> None:
                with replaced(folder / name, content):
                    MembershipStore(folder).membership()

            return Kind((folder / name).read_bytes(), read)

        def reading_der(part: str) -> Kind:
            """Inside of the file's base64, where text that is changed rarely gets."""
            values = json.loads((folder / "membership.json").read_bytes())

            def read(content: bytes) -> None:
                changed = {**values, part: base64.b64encode(content).decode()}
                with replaced(folder / "membership.json", json.dumps(changed).encode()):
                    MembershipStore(folder).membership()

            return Kind(base64.b64decode(values[part]), read)

        kinds = {
            **{name: open_with(name) for name in ("membership.json", "identity.pem")},
            **{
                part: reading_der(part)
                for part in ("certificate", "cluster", "key", "taken_in", "past")
            },
            "rotation": Kind(rotation, kitchen.following),
            "token": Kind(
                token(founded), lambda text: enrolled_by_token(text, "it", "cellar", identity)
            ),
            "the expelled": Kind(
                founded.expelled.signed, lambda signed: Expelled.read(signed, founded.cluster)
            ),
        }
        return {name: dataclasses.replace(kind, has_own_keys=True) for name, kind in kinds.items()}

    def _reply(self, folder: Path) -> Kind:
        path = folder / f"{'0' * 8}.reply"
        sound = journal_of(folder)

        def read(content: bytes) -> None:
            path.write_bytes(content)
            JournalFolder(folder).open(path.stem).close()

        path.touch(0o600)
        return Kind(sound, read)

    def _lines_of_a_reply(self, folder: Path) -> Kind:
        """Behind their checksums, where bytes that are changed rarely get."""
        path = folder / f"{'0' * 8}.reply"
        lines = [json.loads(line[9:]) for line in journal_of(folder).splitlines()]
        path.touch(0o600)

        def read(content: bytes) -> None:
            try:
                found = json.loads(content)
            except (ValueError, RecursionError):
                found = [content.decode(errors="replace")]
            checksum, changed = 0, b""
            for line in found if isinstance(found, list) else [found]:
                body = json.dumps(line).encode()
                checksum = zlib.crc32(body, checksum)
                changed += b"%08x %s\n" % (checksum, body)
            path.write_bytes(changed)
            JournalFolder(folder).open(path.stem).close()

        return Kind(json.dumps(lines).encode(), read)

    def _read_plan(self, content: bytes) -> None:
        path = self._folder / "plan.json"
        path.write_bytes(content)
        read_plan(path, "auto")

    def _render(self, source: bytes) -> None:
        self._rendered += 1
        if not self._rendered % _TEMPLATES_OF_A_PROCESS:  # which keeps them all, compiled
            self._template.close()
        template = _OfOneProcess(source.decode(errors="replace"), self._template)
        template.render(
            [{"role": "user", "content": "hi"}],
            add_generation_prompt=True,
            tools=None,
            variables={"bos_token": "<s>", "eos_token": "</s>"},
        )

    def close(self) -> None:
        """Ends the process of its templates."""
        self._template.close()


class _OfOneProcess(ChatTemplate):
    """By the process of another one, or most of a template's time would be that of its start."""

    def __init__(self, source: str, other: ChatTemplate) -> None:
        super().__init__(source, "it")
        self._process = other._process


class as_before:
    """A folder of small files that is afterwards as it was, whatever became of it. Files that
    nobody has written to are left alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sound = {path.name: path.read_bytes() for path in folder.iterdir()}
        self._known: dict[str, tuple[int, ...]] = {}

    def __enter__(self) -> None:
        self._known = self._found()

    def __exit__(self, *_: object) -> None:
        try:
            found = self._found()
        except OSError:
            found = {}
        if not found.keys() <= self._sound.keys():
            shutil.rmtree(self._folder)
            found = {}
        self._folder.mkdir(exist_ok=True)
        for name, content in self._sound.items():
            if name not in found or found[name] != self._known[name]:
                (self._folder / name).write_bytes(content)

    def _found(self) -> dict[str, tuple[int, ...]]:
        with os.scandir(self._folder) as entries:
            stats = {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
        return {name: (each.st_ino, each.st_size, each.st_mtime_ns) for name, each in stats.items()}


def changed(content: bytes, chance: random.Random) -> bytes:
    """In its structure where it is JSON, in its bytes, or both."""
    if chance.randrange(4):
        try:
            content = json.dumps(mutated(json.loads(content), chance)).encode()
        except (ValueError, RecursionError):  # no JSON, or nested too deeply
            content = mutated_bytes(content, chance)
    if not chance.randrange(3):
        content = mutated_bytes(content, chance)
    return content


SPARSE = spec_of(
    [
        LayerSpec(
            mixer=plain_layer(num_heads=2, num_kv_heads=1, head_size=4).mixer,
            feed_forward=Experts(
                num_experts=4, top_k=2, columns=8, activation="silu", renormalized=True
            ),
        )
    ],
    hidden_size=8,
    vocab_size=10,
)
SPARSE_COUNTS = {0: np.asarray([7, 60, 5, 20], np.float32)}


def _plan() -> bytes:
    shard = partition.Shard(
        device="d", heads=range(4), ffn_columns=range(8), vocab=range(50), streamed_layers=1
    )
    halves = [
        dataclasses.replace(shard, device=name, heads=heads, vocab=vocab, experts=experts)
        for name, heads, vocab, experts in (
            ("a", range(2), range(25), ((0, 2), (1, 3))),
            ("b", range(2, 4), range(25, 50), ((1, 3), (0, 2))),
        )
    ]
    stages = (
        partition.Stage(layers=range(2), shards=(shard,)),
        partition.Stage(layers=range(2, 4), shards=tuple(halves)),
    )
    return json.dumps(to_json(partition.Plan(model="m", version=1, stages=stages))).encode()


@contextlib.contextmanager
def target() -> Iterator[Target]:
    """For `coverage_guided`."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Files(Path(folder))) as files,
    ):
        yield Target(
            sound=[
                (name, each)
                for name, kind in files.kinds.items()
                for each in (kind.sound, *kind.others)
            ],
            lasting=lambda name: not files.kinds[name].has_own_keys,
            changed=changed,
            outcome=files.outcome,
        )


def main() -> None:
    """Try many, and say what became of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds with this pattern in their name")
    given = parser.parse_args()
    outcomes: Counter[str] = Counter()
    began_s, slowest = time.perf_counter(), (0.0, 0)
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder,
        contextlib.closing(Files(Path(folder))) as files,
    ):
        files.kinds = {
            name: kind for name, kind in files.kinds.items() if re.search(given.only, name)
        }
        first_bytes = _peak_bytes()
        gc.freeze()  # or what has been imported is looked through again and again
        for number in range(given.count):
            seed = (given.seed << 40) + number
            start_s = time.perf_counter()
            try:
                outcomes[files.try_one(seed)] += 1
            except BaseException:
                print(f"seed {seed} failed")
                raise
            slowest = max(slowest, (time.perf_counter() - start_s, seed))
    peak_bytes = _peak_bytes()
    print(
        f"{given.count} files in {time.perf_counter() - began_s:.0f} s, the slowest in "
        f"{1e3 * slowest[0]:.0f} ms (seed {slowest[1]}), with at most {peak_bytes >> 20} MiB:"
    )
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:8} {outcome}")
    assert slowest[0] < _MOST_S, f"seed {slowest[1]} took {slowest[0]:.0f} s"
    assert peak_bytes - first_bytes < _MOST_BYTES, f"{peak_bytes >> 20} MiB"


def _peak_bytes() -> int:
    """Of this process and of any that it has waited for: each alone."""
    whose = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return max(resource.getrusage(each).ru_maxrss for each in whose) << 10


if __name__ == "__main__":
    main()
