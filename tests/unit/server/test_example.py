"""A request over HTTP to a model that is told what to say; CONTRIBUTING.md shows it."""

import asyncio
import json

from tests.support.scripted_models import ScriptedModel, Visit, word


def test_a_completion_has_the_text_of_the_model() -> None:
    async def main() -> None:
        model = ScriptedModel()
        for each in (word("In the "), word("barn.", ends=True)):
            model.says.put_nowait(each)
        visit = Visit(model, "/v1/completions", {"prompt": "Where is the cat?"})
        await visit.running
        assert visit.status == 200
        assert json.loads(visit.text)["choices"][0]["text"] == "In the barn."

    asyncio.run(main())
