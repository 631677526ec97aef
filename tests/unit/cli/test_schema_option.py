"""`--json-schema`: a file, or any object."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from edge.answers.terms import GenerationOptions
from edge.cli.options import generation_options
from edge.errors import RequestError


@click.command()
@generation_options
def command(generation: GenerationOptions) -> None:
    click.echo(json.dumps(generation.json_schema))


def test_a_file_or_any_object(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "integer"}')
    run = CliRunner().invoke
    assert json.loads(run(command, ["--json-schema", str(file)]).output) == {"type": "integer"}
    assert json.loads(run(command, ["--json-schema", "object"]).output) == "object"
    assert json.loads(run(command, []).output) is None


@pytest.mark.parametrize("content", ["[1]", "{", None])
def test_what_is_none_is_said(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "schema.json"
    if content is not None:
        file.write_text(content)
    failed = CliRunner().invoke(command, ["--json-schema", str(file)]).exception
    assert isinstance(failed, RequestError)
    assert "schema" in str(failed)
