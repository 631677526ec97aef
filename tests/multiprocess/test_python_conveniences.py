"""What people expect of a model in Python: conversations, many prompts, scores, how it is shown."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import edge
from edge.text.tool_schema import tool_schemas
from tests.multiprocess.conftest import LONG_CONTEXT
from tests.support.checkpoints import TinyCheckpoint
from tests.support.processes import cluster_of_daemons
from tests.support.processes import edge as command_line

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[edge.Cluster]:
    with cluster_of_daemons(tmp_path_factory.mktemp("daemon"), ("--threads", "1")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def model(cluster: edge.Cluster, talker: Path) -> Iterator[edge.Model]:
    with cluster.load(talker, dtype="float32", concurrency=2) as model:
        model.tokenizer.encode_chat(TURNS)  # the process of its template ends with the model
        yield model


def test_a_conversation(model: edge.Model) -> None:
    by_hand = model.generate("<system>Be brief.<user>Hello<assistant>", max_new_tokens=8)
    reply = model.chat(TURNS, max_new_tokens=8)
    assert reply.token_ids == by_hand.token_ids
    with model.stream_chat(TURNS, max_new_tokens=8) as stream:
        assert "".join(token.text for token in stream) == reply.text
    quick = model.chat(TURNS, max_new_tokens=8, thinking=False)
    written = "<system>Be brief.<user>Hello<assistant><quick>"
    assert quick.token_ids == model.generate(written, max_new_tokens=8).token_ids
    assert quick.token_ids != reply.token_ids
    assert model.chat(TURNS, max_new_tokens=8, thinking=True).token_ids == reply.token_ids
    with pytest.raises(edge.RequestError, match="use chat or stream_chat"):
        model.generate("Hello", thinking=False)
    one = model.chat("Hello", edge.GenerationOptions(max_new_tokens=4))
    assert one.token_ids == model.chat([TURNS[1]], max_new_tokens=4).token_ids


def test_the_context_is_as_long_as_there_is_memory_for(
    cluster: edge.Cluster, endless_checkpoint: TinyCheckpoint
) -> None:
    path = endless_checkpoint.path
    planned = cluster.propose(path, measure="nothing")
    assert planned.context_tokens == LONG_CONTEXT
    prompt = [3] * 5000
    with cluster.load(path, dtype="float32") as whole:
        assert whole.context_tokens == LONG_CONTEXT
        assert whole.proposal.context_tokens == LONG_CONTEXT
        reply = whole.generate(prompt, max_new_tokens=2)
    with cluster.load(path, dtype="float32", context_tokens=5002) as said:
        assert said.context_tokens == 5002
        assert said.generate(prompt, max_new_tokens=2).token_ids == reply.token_ids


def weather(city: str) -> str:
    """The weather.

    Args:
        city: Its name.
    """
    return f"fine in {city}"


def test_tools_are_told_and_calls_are_read(
    cluster: edge.Cluster, talker: Path, tmp_path: Path
) -> None:
    """So tiny a model calls no tool: how an answer is read is tried with one that is written."""
    folder = Path(shutil.copytree(talker, tmp_path / "caller"))
    template = "{% for t in tools %}{{ t.function | tojson }}{% endfor %}|{{ messages[0].content }}"
    (folder / "chat_template.jinja").write_text(template)
    with cluster.load(folder, dtype="float32") as model:
        reply = model.chat("Hi", tools=[weather], max_new_tokens=8)
        schema = tool_schemas([weather])
        assert schema is not None
        ids = model.tokenizer.encode_chat([{"role": "user", "content": "Hi"}], tools=schema)
        by_hand = model.generate(ids, max_new_tokens=8)
        assert reply.token_ids == by_hand.token_ids
        written = model.tokenizer.decode(ids)
        assert "weather" in written
        assert "Its name." in written
        assert reply.message["content"] == reply.content == reply.text
        assert (reply.tool_calls, reply.reasoning) == ((), "")
        with pytest.raises(edge.RequestError, match="tool <lambda> has no docstring"):
            model.chat("Hi", tools=[lambda x: x])
        with pytest.raises(edge.RequestError, match="tool_choice wants 'tides', which is not"):
            model.chat("Hi", tools=[weather], tool_choice="tides")
        ids, options, tools, _tiles = model._asking.chat_prompt(
            "Hi",
            edge.GenerationOptions(),
            tools=[weather],
            tool_choice="auto",
            variables=None,
        )
        answer = '{"name": "weather", "parameters": {"city": "Lima"}}'
        reading = model._asking.terms(ids, options, tools).reading
        assert reading is not None
        (call,) = reading.parser().feed(answer)
        assert isinstance(call, edge.ToolCall)
        assert weather(**call.arguments) == "fine in Lima"


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ({"role": "user", "content": "x"}, r"not {'content': 'x', 'role': 'user'}; write \[{"),
        (3, "messages are a list of objects with role and content, not 3; write"),
        ([], "at least one message, and there is none; give one"),
        (["x"], "an object with role and content, not 'x'; write"),
        ([{"content": "x"}], "a chat message has no role"),
        ([{"role": "user", "content": {"text": "x"}}], "a text or a list of its parts, not {'text"),
        ([{"role": "user", "content": ["x"]}], "a text or a list of its parts, not ..x"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}],
            "a part of type 'image_url', and only text and images are read; leave it out",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "a part of a message has no text"),
    ],
    ids=str,
)
def test_messages_that_are_none_are_refused(
    model: edge.Model, messages: Any, sentence: str
) -> None:
    with pytest.raises(edge.RequestError, match=sentence) as raised:
        model.chat(messages, max_new_tokens=1)
    assert raised.value.remedy
    with pytest.raises(edge.RequestError, match=sentence):
        model.tokenizer.chat(messages)


def test_images_are_refused_by_a_model_that_reads_none(model: edge.Model) -> None:
    image = {"type": "image", "image": b"not even looked at"}
    with pytest.raises(edge.RequestError, match=f"{model.name} reads no images; leave them out"):
        model.chat([{"role": "user", "content": [image]}])
    assert not model.reads_pictures


def test_images_of_a_prompt_are_refused_by_a_model_that_reads_none(
    cluster: edge.Cluster, talker: Path
) -> None:
    (address,) = (peer.address for peer in cluster.peers)
    given = ("run", talker, "-p", "What is it?", "--image", "a.png", "--peer", address)
    assert f"{talker.name} reads no images; leave them out" in command_line(*given).sentence()
    told = command_line(*given, "--raw").sentence()
    assert told.startswith("images have their place in the chat template, and --raw uses none")


def test_parts_of_a_text_are_one(model: edge.Model) -> None:
    """Also of an answer that is gone on with."""
    parts = [{"type": "text", "text": "Hel"}, {"type": "input_text", "text": "lo"}]
    assert model.tokenizer.chat([TURNS[0], {"role": "user", "content": parts}]) == (
        model.tokenizer.chat(TURNS)
    )
    begun: dict[str, object] = {"role": "assistant", "content": [{"type": "text", "text": "Hi"}]}
    assert model.tokenizer.chat([*TURNS, begun]).endswith("<assistant>Hi")
    found: dict[str, object] = {"role": "tool", "content": {"fine": True}}
    assert "{'fine': True}" in model.tokenizer.chat([*TURNS, found])


def test_tools_that_no_template_tells_of_are_refused(model: edge.Model) -> None:
    with pytest.raises(edge.RequestError, match=r"talker takes no tools, .*; leave tools out, or"):
        model.chat("Hi", tools=[weather], max_new_tokens=1)
    assert model.chat("Hi", tools=[weather], tool_choice="none", max_new_tokens=1).token_ids


def test_a_conversation_on_a_loop(cluster: edge.Cluster, talker: Path, model: edge.Model) -> None:
    async def talk() -> tuple[edge.Reply, str]:
        async with (
            await edge.AsyncCluster.connect(cluster.peers) as here,
            await here.load(talker, dtype="float32") as loaded,
        ):
            reply = await loaded.chat(TURNS, max_new_tokens=8)
            text = ""
            async with await loaded.stream_chat(TURNS, max_new_tokens=8) as stream:
                async for token in stream:
                    text += token.text
            assert repr(loaded).startswith("<AsyncModel talker (float32) on 1 device")
            return reply, text

    reply, text = asyncio.run(talk())
    assert reply.text == text
    assert reply.token_ids == model.chat(TURNS, max_new_tokens=8).token_ids


def test_many_prompts_have_their_answers_in_order(model: edge.Model) -> None:
    prompts = [f"{number} and more"[: 3 + number] for number in range(5)]
    told: list[edge.Progress] = []
    replies = model.generate(prompts, max_new_tokens=6, progress=told.append)
    assert [(each.phase, each.done, each.total) for each in told] == [
        ("generate", done, 5) for done in range(6)
    ]
    assert [reply.token_ids for reply in replies] == [
        model.generate(prompt, max_new_tokens=6).token_ids for prompt in prompts
    ]
    assert model.generate([], max_new_tokens=6, progress=told.append) == []
    assert model.generate([], temperature=0.5, progress=True) == []
    assert model.embed([]).shape == (0, model.hidden_size)
    ids = [model.tokenizer.encode(prompt) for prompt in prompts[:2]]
    assert [each.token_ids for each in model.generate(ids, max_new_tokens=6)] == [
        each.token_ids for each in replies[:2]
    ]
    with pytest.raises(edge.RequestError, match="the prompt has 600 tokens"):
        model.generate(["short", "x" * 600], max_new_tokens=6)
    assert model.generate("short", max_new_tokens=2).token_ids, "the rest was ended"


def test_a_text_is_scored(
    model: edge.Model, tiny_checkpoint: Callable[..., TinyCheckpoint]
) -> None:
    score = model.score("Hello there")
    ids = model.tokenizer.encode("Hello there")
    logits = tiny_checkpoint("llama").logits(ids)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()
    wanted = [expected[place, token] for place, token in enumerate(ids[1:])]
    assert score.token_ids == tuple(ids)
    np.testing.assert_allclose(score.logprobs, wanted, atol=1e-4)
    assert score.total == pytest.approx(sum(wanted), abs=1e-3)
    assert score.perplexity == pytest.approx(np.exp(-np.mean(wanted)), rel=1e-3)
    with pytest.raises(
        edge.RequestError, match="needs at least two tokens, and the text has one; give a longer"
    ):
        model.score(ids[:1])
    with pytest.raises(edge.RequestError, match=r"a longer text|the prompt is empty"):
        model.score("")
    np.testing.assert_array_equal(model.logits("Hello there"), model.logits(ids))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda model, _c: model.generate("x", max_tokens=3),
            "Model.generate has no 'max_tokens'; do you mean max_new_tokens?",
        ),
        (lambda model, _c: model.stream("x", temprature=1), "do you mean temperature?"),
        (lambda model, _c: model.chat("x", tool=[]), "do you mean tools?"),
        (lambda model, _c: model.generate(["x"], progres=True), "do you mean progress?"),
        (
            lambda model, _c: model.chat("x", foo=1),
            "Model.chat has no 'foo'; there are tools",
        ),
        (
            lambda _m, cluster: cluster.load("x", context=5),
            "Cluster.load has no 'context'; do you mean context_tokens?",
        ),
    ],
)
def test_a_wrong_name_is_told_the_near_one(
    cluster: edge.Cluster, model: edge.Model, call: Callable[[Any, Any], Any], message: str
) -> None:
    with pytest.raises(TypeError) as raised:
        call(model, cluster)
    assert message in str(raised.value)


def test_an_answer_is_as_long_as_the_context_has_room(model: edge.Model) -> None:
    """What goes on from a text is not, unless that is asked for."""
    ids = model.tokenizer.encode("Hello")
    for answer, most in (
        (model.chat(TURNS, ignore_eos=True), model.context_tokens),
        (model.generate(ids, ignore_eos=True), model.context_tokens),
        (model.generate("Hello", ignore_eos=True), 128 + len(ids)),
        (model.generate("Hello", ignore_eos=True, max_new_tokens=200), 200 + len(ids)),
    ):
        figures = answer.statistics
        assert figures["prompt_tokens"] + figures["new_tokens"] == most
        assert answer.finish_reason == "length"


def test_messages_are_no_prompt(model: edge.Model) -> None:
    turns: Any = TURNS
    for call in (model.generate, model.stream):
        with pytest.raises(edge.RequestError, match="messages are for chat and stream_chat"):
            call(turns)


@pytest.mark.parametrize(
    "given",
    [TURNS[0], None, 5, (each for each in TURNS)],
    ids=lambda each: type(each).__name__,
)
def test_messages_are_a_list(model: edge.Model, given: Any) -> None:
    for call in (model.chat, model.stream_chat):
        with pytest.raises(edge.RequestError, match="messages are a list of objects") as raised:
            call(given)
        assert raised.value.remedy.startswith('write [{"role": "user"')


def test_how_things_are_shown(cluster: edge.Cluster, model: edge.Model, talker: Path) -> None:
    assert repr(model) == "<Model talker (float32) on 1 device, context 512 tokens>"
    assert repr(cluster) == "<Cluster of 1 peer: local-1; 1 model loaded>"
    assert set(dir(edge)) == set(edge.__all__) >= {"Cluster", "Score", "inspect", "Estimate"}
    for held in (model.sampling, model.work, model.plan, model.tokenizer, *model.measure()):
        assert isinstance(held, getattr(edge, type(held).__name__)), "it has a public name"
    prompt = [5] * 3
    reply = model.generate(prompt, max_new_tokens=2)
    shown = f"of 2 tokens (length): {reply.text!r}>"
    assert repr(reply) == f"<Reply {shown}"
    with model.stream(prompt, max_new_tokens=2) as stream:
        assert repr(stream).startswith("<ReplyStream of ")
        assert len(list(stream)) == 2
    assert repr(stream) == f"<ReplyStream {shown}"
    assert repr(model.plan) == "<Plan 1 of talker: 1 stage on 1 device>"
    assert repr(model.proposal).startswith(f"<Proposal of {model.plan}: context 512 tokens")
    assert re.fullmatch(
        r"<PeerInfo local-1 at 127\.0\.0\.1:\d+: ort, \w+, \S+ \w+ of \S+ \w+ free>",
        repr(cluster.peers[0]),
    )
    assert repr(model.score([5, 6, 7])).startswith("<Score of 3 tokens: perplexity ")
    held = (model.tokenizer, edge.inspect(talker))
    told = (f"<Tokenizer of {model.tokenizer.vocab_size} tokens", "<Inspection of talker: llama, ")
    for each, beginning in zip(held, told, strict=True):
        assert repr(each).startswith(beginning)
        assert len(repr(each).splitlines()) == 1
