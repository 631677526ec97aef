"""Pictures in conversations, from their files to the tokens of `transformers`: in Python, at a
terminal, and by the clients of other programs."""

from __future__ import annotations

import base64
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import edge
from tests.support.checkpoints import hub
from tests.support.gguf_files import write_gguf
from tests.support.mmproj_files import write_mmproj
from tests.support.processes import PATIENCE_S, edge_process
from tests.support.processes import edge as run_edge
from tests.support.seeing_models import with_random_weights
from tests.support.slow_cases import shown_in_parts
from tests.support.small_pictures import FAMILIES, noise, png
from tests.unit.pictures.test_reader import processor_of, wanted_ids

TOKENS = 12
SMALL, WIDE = noise(64, 64), noise(150, 70)
SAID = "What is this? "


def asked(*pictures: Any) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": each} for each in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": SAID}]}]


class Reference:
    """The model of `transformers` in a checkpoint's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = FAMILIES["smolvlm"].write(folder, "smolvlm")
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.row = self.tokenizer.convert_tokens_to_ids("<image>")
        config = hub.SmolVLMConfig(
            text_config=hub.LlamaConfig(
                vocab_size=len(self.tokenizer),
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=512,
                pad_token_id=0,
            ),
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 64,
                "patch_size": 16,
            },
            scale_factor=2,
            image_token_id=self.row,
            tie_word_embeddings=False,
        )
        self.model = with_random_weights(hub.SmolVLMForConditionalGeneration(config))
        self.model.save_pretrained(folder)

    def text(self, *pictures: Any) -> str:
        """The greedy answer to a question about these pictures."""
        ids = wanted_ids(self.folder, "smolvlm", asked(*pictures))
        processor, _mark = processor_of("smolvlm", self.tokenizer)
        inputs = processor.image_processor(list(pictures), return_tensors="pt")
        tokens = list(ids)
        for _number in range(TOKENS):  # without a cache: with one, answers of this kind differ
            with torch.no_grad():
                logits = self.model(
                    input_ids=torch.tensor([tokens]),
                    pixel_values=inputs["pixel_values"],
                    pixel_attention_mask=inputs["pixel_attention_mask"],
                ).logits
            tokens.append(int(logits[0, -1].argmax()))
        found: str = self.tokenizer.decode(tokens[len(ids) :], skip_special_tokens=True)
        return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def url(reference: Reference) -> Iterator[str]:
    options = ("--local", "2", "--dtype", "float32", "--port", "0", "--json", "--context", "512")
    with edge_process("serve", reference.folder, *options) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_in_python_and_at_a_terminal(reference: Reference, tmp_path: Path) -> None:
    file = tmp_path / "wide.png"
    file.write_bytes(png(WIDE))
    expected = reference.text(WIDE)
    with (
        edge.Cluster.local(1) as cluster,
        cluster.load(reference.folder, dtype="float32", context_tokens=512) as model,
    ):
        assert model.chat(asked(file), max_new_tokens=TOKENS).text == expected
        two = model.chat(asked(SMALL, png(WIDE)), max_new_tokens=TOKENS)
        assert two.text == reference.text(SMALL, WIDE)
    done = run_edge(
        *("run", reference.folder, "-p", SAID, "--image", file, "--local", 1, "--dtype", "float32"),
        *("--context", 512, "-n", TOKENS),
    )
    assert (done.code, expected in done.out) == (0, True), done.err


def test_from_a_gguf_file_and_the_one_beside_it(reference: Reference, tmp_path: Path) -> None:
    family, inner = FAMILIES["smolvlm"], reference.model.model.text_model.state_dict()
    text = hub.LlamaForCausalLM(reference.model.config.text_config)
    head = {"lm_head.weight": reference.model.lm_head.weight}
    text.load_state_dict({**{f"model.{name}": each for name, each in inner.items()}, **head})
    text.save_pretrained(tmp_path / "text")
    family.write(tmp_path / "tokenizer", "smolvlm")
    shutil.copy(tmp_path / "tokenizer" / "tokenizer.json", tmp_path / "text")
    folder = tmp_path / "model"
    folder.mkdir()
    settings = {"chat_template": family.template}
    write_gguf(folder / "model.gguf", tmp_path / "text", tokenizer_settings=settings)
    longest = family.settings["size"]["longest_edge"]
    write_mmproj(
        reference.folder, "smolvlm", folder / "mmproj-F32.gguf", preproc_image_size=longest
    )
    with (
        edge.Cluster.local(1) as cluster,
        cluster.load(folder / "model.gguf", dtype="float32", context_tokens=512) as model,
    ):
        found = model.chat(asked(SMALL, WIDE), max_new_tokens=TOKENS)
    assert found.text == reference.text(SMALL, WIDE)


@shown_in_parts(
    "unit/server/test_pictures_in_requests.py",
    "multiprocess/test_server_clients.py",
    "multiprocess/test_page.py",
)
def test_clients_of_other_programs(reference: Reference, url: str) -> None:
    import anthropic  # a third of all that the tests import, and each worker would
    import ollama
    import openai

    expected = reference.text(SMALL)
    held = base64.b64encode(png(SMALL)).decode()
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{held}"}}
        content: Any = [part, {"type": "text", "text": SAID}]
        told = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": content}],
            max_tokens=TOKENS,
            temperature=0,
        )
        assert told.choices[0].message.content == expected
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as other:
        source = {"type": "base64", "media_type": "image/png", "data": held}
        content = [{"type": "image", "source": source}, {"type": "text", "text": SAID}]
        said = other.messages.create(
            model="default",
            messages=[{"role": "user", "content": content}],
            max_tokens=TOKENS,
        )
        assert said.content[0].text == expected  # type: ignore[union-attr]
    with ollama.Client(url) as third:
        answer = third.chat(
            model="default",
            messages=[{"role": "user", "content": SAID, "images": [png(SMALL)]}],
            options={"num_predict": TOKENS, "temperature": 0},
        )
        assert answer.message.content == expected
