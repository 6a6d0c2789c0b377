"""Runs the scenarios of `ranks.py` in two processes that are joined by gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nursery import Nursery
from ports import free_port

WORLD = 2


def start(nursery: Nursery, out: Path, *scenarios: str, **variables: str) -> list[tuple[int, str]]:
    """Run scenarios one after the other in both ranks; return each rank's exit code and what it printed."""
    return joined(nursery, out, "distributed.ranks.work", out=out, scenarios=scenarios, variables=variables)


def joined(nursery: Nursery, logs: Path, job: str, variables: dict[str, str], **arguments: Any) -> list[tuple[int, str]]:
    """Run a job in both ranks; return each rank's exit code and what it printed."""
    common = {"WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **variables}
    logs.mkdir(exist_ok=True)
    ranks = [nursery.start(job, logs / f"log.{rank}", common | {"RANK": str(rank)}, **arguments) for rank in range(WORLD)]
    return [(rank.wait(), rank.said) for rank in ranks]


def run(nursery: Nursery, out: Path, *scenarios: str, **variables: str) -> None:
    """Run scenarios that are to succeed."""
    for code, error in start(nursery, out, *scenarios, **variables):
        assert code == 0, error[-4000:]


def said(out: Path, scenario: str, rank: int) -> Any:
    """Return what a scenario returned in a rank."""
    return json.loads((out / f"{scenario}.{rank}.json").read_text())
