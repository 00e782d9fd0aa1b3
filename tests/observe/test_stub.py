"""The stub tells what a real process could: its answers are as the description says, and the page has words for each of them."""

import copy
import json
import re

import pytest

import documents
from stub import Handler, Made

API = json.loads((documents.PAGE.parent / "openapi.json").read_text())
SCHEMAS = API["components"]["schemas"]


def closed(schema):
    """Without room for what is not described."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    if found.get("type") == "object" and "properties" in found:
        found.setdefault("additionalProperties", False)
    return found


def deviations(answer, name: str) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema")
    schema = {"$ref": f"#/components/schemas/{name}", "components": closed(copy.deepcopy(API["components"]))}
    return [f"{error.json_path}: {error.message}" for error in jsonschema.Draft202012Validator(schema).iter_errors(answer)]


@pytest.mark.parametrize("kind", ["calm", "trouble", "empty"])
def test_its_answers_are_those_of_a_real_process(kind):
    made = Made(kind)
    made.step(5.0)
    assert deviations(made.state(), "State") == []
    assert deviations(made.ready(), "Readiness") == []


def test_its_answer_to_why_is_that_of_a_real_process():
    assert deviations(Handler.why(None), "Why") == []


def test_what_is_not_described_is_seen():
    assert deviations({"ready": True, "degraded": [], "more": 1}, "Readiness") != []


@pytest.mark.parametrize(
    ("table", "values"),
    [
        ("FAULTS", SCHEMAS["Fault"]["properties"]["what"]["enum"]),
        ("REASONS", SCHEMAS["Missing"]["properties"]["reason"]["enum"]),
    ],
)
def test_the_page_has_words_for_each(table, values):
    body = re.search(rf"const {table} = {{(.*?)\n}};", (documents.PAGE / "page.js").read_text(), re.DOTALL)[1]
    assert re.findall(r"^  (\w+):", body, re.MULTILINE) == values
