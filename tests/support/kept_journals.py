"""A journal of a reply with something in every field."""

from __future__ import annotations

from pathlib import Path

from edge.answers.journal_folder import JournalFolder
from edge.answers.journal_records import JournaledLoad, JournalHead
from edge.answers.terms import AnswerReading, Terms
from edge.kernels.sampling.logprobs import Logprobs
from edge.kernels.sampling.parameters import SamplingParameters
from edge.planning.load_options import LoadOptions
from edge.protocol.lease import Lease
from edge.text.answer_forms import AnswerForm
from edge.text.grammar import Grammar
from tests.support.plans import bundled_plan

LIKELY = Logprobs(logprob=-0.1234567890123456, top=((7, -0.5), (9, -1e39)))


def asked() -> JournalHead:
    terms = Terms(
        prompt=(1, 2, 3),
        max_new_tokens=20,
        sampling=SamplingParameters(
            temperature=0.7, logit_bias={5: -1.5}, min_tokens=3, seed=2**64 - 1
        ),
        stop=("\n\n", "é"),
        end_ids=frozenset({0, 4}),
        logprobs=2,
        grammar=Grammar('start: "a"'),
        reading=AnswerReading(
            thinking=True, form=AnswerForm(), tools={"look": {"at": ("integer", "null"), "how": ()}}
        ),
        client="laptop",
        priority="high",
        cache_salt="salt",
    )
    load = JournaledLoad.of(
        Path("model"),
        "f" * 64,
        LoadOptions(dtype="int4", lora="adapter", plan=bundled_plan("tensor_2")),
        context_tokens=128,
        plan=bundled_plan("tensor_2", devices=["id1", "id2"]),
        names={"id1": "attic", "id2": "cellar"},
    )
    return JournalHead(begun_s=1e9, load=load, terms=terms)


def journal_of(folder: Path) -> bytes:
    """One that was gone on with after three tokens, and then finished. Leaves nothing there."""
    replies = JournalFolder(folder)
    begun = replies.begin(asked(), Lease(run="a run"))
    assert begun is not None
    begun.begun(((0, 1),))
    for token in range(3):
        begun.token(token, None, LIKELY)
    begun.close()
    with replies.open(begun.id) as journal:
        journal.token(4, "stop", LIKELY)
        content = journal.path.read_bytes()
        journal.remove()
    return content
