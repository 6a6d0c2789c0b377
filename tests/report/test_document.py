from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from trueup.doors.report.document import document, dumps, json_plain, schema
from trueup.foundation.model import Result

from .results import HOSTILE, crowded, culprit, missing, ranks, result, slot, stats

DOCS = Path(__file__).parents[2] / "docs" / "verdict-json.md"


def strange() -> Result:
    worst = slot("output.0", "incomparable", math.nan, "none", baseline=stats(min=-math.inf, l2=math.nan), candidate=None)
    found = culprit(slots=(worst,), error_out=math.inf, expected=math.nan, scope=HOSTILE, source="\udc80.py:1")
    lost = dataclasses.replace(result().candidate, losses=((0, math.nan), (1, -math.inf)))
    return result(culprits=(found,), candidate=lost, sentence="x")


@pytest.mark.parametrize("shown", [result(), result("aligned"), result("inconclusive"), crowded(), ranks(), strange()])
def test_every_document_is_strict_json_and_fulfils_the_schema(shown: Result) -> None:
    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is not JSON")

    read = json.loads(dumps(document(shown)), parse_constant=refuse)
    assert read == document(shown)
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(read, schema(), cls=jsonschema.Draft202012Validator)


def test_numbers_without_json_have_names() -> None:
    assert [json_plain(value) for value in (1.5, math.nan, math.inf, -math.inf)] == [
        1.5,
        "NaN",
        "Infinity",
        "-Infinity",
    ]
    read = document(strange())
    assert read["candidate"]["losses"] == [{"step": 0, "loss": "NaN"}, {"step": 1, "loss": "-Infinity"}]
    assert read["culprits"][0]["error_out"] == "Infinity"
    assert read["culprits"][0]["slots"][0]["baseline"]["min"] == "-Infinity"


def test_what_a_script_reads() -> None:
    read = document(result())
    assert (read["schema"], read["schema_version"], read["verdict"], read["exit_code"]) == (
        "trueup-verdict",
        1,
        "deviates",
        1,
    )
    assert read["culprits"][0]["scope"] == "neck.lstm"
    assert (read["culprits"][0]["seq_baseline"], read["culprits"][0]["seq_candidate"]) == (412, 418)
    assert read["next_command"] == "trueup show runs/npu --scope neck.lstm --phase backward --step 0 --level api"
    assert document(crowded())["unmatched"][0]["side"] == "baseline"


def test_a_culprit_whose_elements_were_kept_is_to_be_reproduced() -> None:
    kept = (slot("grad_input.0", "deviates", 0.21, "tensor"),)
    command = document(result(culprits=(culprit(slots=kept),)))["next_command"]
    assert command == "trueup reproduce runs/cpu 412 --device npu -o runs/npu-reproducer"
    module = culprit(slots=kept, level="module")
    assert document(result(culprits=(module,)))["next_command"].startswith("trueup show runs/npu ")


def test_the_command_cannot_be_made_to_do_something_else() -> None:
    shown = result(culprits=(culprit(scope="a; rm -rf ~\n$(x)"),))
    command = document(shown)["next_command"]
    assert "--scope 'a; rm -rf ~\\n$(x)' --phase" in command
    assert "\n" not in command
    assert document(result(culprits=(), unmatched=(missing("baseline"),)))["next_command"].startswith("trueup show runs/cpu ")


def test_the_page_in_docs_names_every_field() -> None:
    page = set(re.findall(r"`(\w+)`", DOCS.read_text(encoding="utf-8")))
    definitions = schema()["$defs"]
    names = set(schema()["properties"]).union(*(part.get("properties", {}) for part in definitions.values()))
    names |= set(definitions["stats"]["required"])
    assert names - {"step", "loss"} <= page
