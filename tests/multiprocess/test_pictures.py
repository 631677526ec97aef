"""Answers to prompts with pictures are those of `transformers`, on any plan, and go on when devices
are lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import edge
from edge.answers.terms import GenerationOptions
from edge.api.reply import Reply, ReplyStream
from edge.errors import RequestError
from edge.memory.tower_memory import tower_use
from edge.models.spec import TILED_ATTENTION
from edge.models.towers.part import TowerPart
from edge.runs.pictures import Pictures
from edge.weights.formats import WeightFormat, weight_format
from tests.support.plans import LAYOUTS, make_plan
from tests.support.processes import Daemon, cluster_of_daemons, start_together
from tests.support.seeing_models import FAMILIES, GGUF_TEXTS, Asked, SeeingModel
from tests.support.slow_cases import every_pair, repeats_are_slow, shown_in_parts

CONTEXT = 512
TOKENS = 16
PLANS = ("solo", "pipeline_2", "tensor_3")
SLOW = shown_in_parts("unit/weights/test_gguf_towers.py")
OTHER_GGUF_FAMILIES = [each for each in FAMILIES if each not in ("qwen3_vl", "gemma4_large")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[edge.Cluster]:
    with cluster_of_daemons(tmp_path_factory.mktemp("daemons"), (), (), (), ()) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SeeingModel]:
    return {}


def model_of(
    family: str, made: dict[str, SeeingModel], folders: pytest.TempPathFactory
) -> SeeingModel:
    if family not in made:
        made[family] = SeeingModel(family, folders.mktemp(family))
    return made[family]


def loaded(cluster: edge.Cluster, model: SeeingModel, layout: str, **options: Any) -> edge.Model:
    plan = make_plan(model.spec, layout, model=model.path.name, column_multiple=32)
    options = {"dtype": "float32", "context_tokens": CONTEXT, **options}
    return cluster.load(model.path, plan=plan, **options)


def answer(model: edge.Model, asked: Asked, tokens: int, prompt: Sequence[int] = ()) -> Reply:
    options = GenerationOptions(max_new_tokens=tokens, ignore_eos=True)
    begin = model._asking.reply_to(prompt or asked.prompt, options, tiles=asked.tiles)
    stream = ReplyStream(begin, model._loop)
    for _token in stream:
        pass
    return stream.reply()


def pictures_of(model: edge.Model) -> Pictures:
    pictures = model._asking._model.pictures
    assert pictures is not None
    return pictures


@pytest.mark.parametrize(
    ("family", "layout", "count"), repeats_are_slow(every_pair(FAMILIES, PLANS, (2, 3, 1)))
)
def test_answers(
    cluster: edge.Cluster,
    made: dict[str, SeeingModel],
    tmp_path_factory: pytest.TempPathFactory,
    family: str,
    layout: str,
    count: int,
) -> None:
    seeing = model_of(family, made, tmp_path_factory)
    asked = seeing.asked(count, before=40, seed=count)
    expected = seeing.greedy(asked, TOKENS)
    with loaded(cluster, seeing, layout) as model:
        reply = answer(model, asked, TOKENS)
        assert list(reply.token_ids) == expected
        pictures = pictures_of(model)
        assert reply.statistics["tiles_read"] == count
        planned = {f"local-{number + 1}" for number in range(len(LAYOUTS[layout]))}
        if layout != "tensor_3":
            assert planned.isdisjoint(pictures.devices)
        further = (*asked.prompt, *expected, 5, 6)
        reply = answer(model, asked, 4, further)
        assert reply.statistics["tiles_read"] == 0, "the next turn reads nothing"
        if not any(each.window for each in seeing.spec.attentions.values()):
            # Of windows, so small a context keeps no copies.
            assert reply.statistics["found_tokens"] >= len(asked.prompt) - 6


@pytest.mark.parametrize(
    "family",
    ["qwen3_vl", "gemma4_large", *(pytest.param(each, marks=SLOW) for each in OTHER_GGUF_FAMILIES)],
)
def test_answers_from_a_gguf_file_and_the_one_beside_it(
    cluster: edge.Cluster, tmp_path: Path, family: str
) -> None:
    seeing = SeeingModel(family, tmp_path / "folder", **GGUF_TEXTS.get(family, {}))
    seeing.as_gguf(tmp_path / "files")
    asked = seeing.asked(2, before=40, seed=3)
    with loaded(cluster, seeing, "pipeline_2") as model:
        assert list(answer(model, asked, TOKENS).token_ids) == seeing.greedy(asked, TOKENS)


def test_a_device_without_the_library_is_told(
    cluster: edge.Cluster, made: dict[str, SeeingModel], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Where rows of a picture see each other: its text is answered there."""
    seeing = model_of("gemma4_large", made, tmp_path_factory)
    asked = seeing.asked(1, before=4, seed=1)
    with loaded(cluster, seeing, "solo") as model:
        pictures = pictures_of(model)
        able = pictures._candidates()
        lacking = [replace(each, lacks=(*each.lacks, TILED_ATTENTION)) for each in able]
        pictures._candidates = lambda: lacking
        with pytest.raises(RequestError, match=r"see each other; install edge-inference\[fast\]"):
            answer(model, asked, 2)


def test_a_tower_that_fits_on_no_device_is_cut(tmp_path: Path) -> None:
    """Over two of three devices; after the loss of one of them, over the other two."""
    sizes = {"hidden_size": 240, "intermediate_size": 1024, "num_hidden_layers": 6}
    seeing = SeeingModel("smolvlm", tmp_path / "model", sizes)
    need = tower_use(TowerPart.whole(seeing.tower), _float32(seeing)).total
    asked, other = seeing.asked(1, before=20, seed=1), seeing.asked(2, before=20, seed=2)
    names = ("local-1", "local-2", "local-3")
    starts = [partial(Daemon, tmp_path / name, "--no-announce", "--name", name) for name in names]
    with (
        start_together(*starts) as daemons,
        edge.Cluster.connect([daemon.address for daemon in daemons]) as cluster,
        loaded(cluster, seeing, "solo") as model,
    ):
        for daemon, share in zip(daemons, (0.7, 0.8, 0.7), strict=True):
            peer = daemon.describe()
            taken = peer.memory_bytes - peer.free_bytes
            cluster.set_memory(peer, taken + int(share * need))
        reply = answer(model, asked, 8)
        assert list(reply.token_ids) == seeing.greedy(asked, 8)
        assert reply.statistics["tiles_read"] == 1
        assert pictures_of(model).devices == ["local-2", "local-3"]
        daemons[1].kill()
        reply = answer(model, other, 8)
        assert list(reply.token_ids) == seeing.greedy(other, 8)
        assert reply.statistics["tiles_read"] == 2
        assert pictures_of(model).devices == ["local-3", "local-1"]
        assert answer(model, other, 2).statistics["tiles_read"] == 0


def _float32(seeing: SeeingModel) -> WeightFormat:
    return weight_format(seeing.tower.encoder, "float32")


@pytest.mark.parametrize("gone", ["reader", "sampler"])
def test_a_lost_device_changes_no_token(
    made: dict[str, SeeingModel],
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    gone: str,
) -> None:
    """The one that read the picture, which the next picture then has another reader of; or one of
    the plan, whose tokens are computed again."""
    seeing = model_of("qwen3_5", made, tmp_path_factory)
    asked, other = seeing.asked(1, before=20, seed=1), seeing.asked(2, before=20, seed=2)
    starts = [
        partial(Daemon, tmp_path / name, "--no-announce", "--name", name)
        for name in ("local-1", "local-2", "local-3")
    ]
    with (
        start_together(*starts) as daemons,
        edge.Cluster.connect([daemon.address for daemon in daemons]) as cluster,
        loaded(cluster, seeing, "pipeline_2") as model,
    ):
        names = dict(zip(("local-1", "local-2", "local-3"), daemons, strict=True))
        options = GenerationOptions(max_new_tokens=60, ignore_eos=True)
        begin = model._asking.reply_to(asked.prompt, options, tiles=asked.tiles)
        stream = ReplyStream(begin, model._loop)
        tokens = [next(stream).token_id for _number in range(3)]
        (reader,) = pictures_of(model).devices
        assert reader == "local-3"
        names[reader if gone == "reader" else "local-2"].kill()
        tokens += [token.token_id for token in stream]
        assert tokens == seeing.greedy(asked, 60)
        assert len(model.recoveries) == (gone == "sampler")
        assert list(answer(model, other, 8).token_ids) == seeing.greedy(other, 8)
        assert pictures_of(model).read == 3
