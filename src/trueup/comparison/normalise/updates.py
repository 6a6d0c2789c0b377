"""What optimizers made of weights, weight by weight: for two frameworks, whose kernels and states have nothing else in common.

Each step's optimizer becomes one call, `STEP`. For each parameter it reads the weight as the step's forward read it
(``input.<layer>.<parameter>``) and gives it as the next step's forward reads it (``output.…``). Beside them stand the norm of
their difference (``step.…``) and the gradient, where it is known (``gradient.…``). Nobody reads what the last step wrote: there a
weight is what the call wrote that wrote it in the step before (same operator, ordinal and slot). Where that does not find all
weights the step's optimizer is not compared, and `Updates.unseen` says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueup.comparison.normalise.layouts import NEUTRAL, gradients_of_layers, laid_out, masked, put
from trueup.foundation.facts.slots import STEP as STEP
from trueup.foundation.frameworks.dialect import Dialect
from trueup.foundation.frameworks.tables import Axes
from trueup.foundation.kernels import distance
from trueup.foundation.store import Capture
from trueup.foundation.store.schema import TYPES, sketch_rows

ADDED = "added"  # in the slots of `STEP`: what a weight's last call reads beside it

OF_STEP = {
    "parent": None, "phase": "optimizer", "level": "module", "scope": "", "op": STEP, "ordinal": 0, "value": None,
    "forward_seq": None,
}  # fmt: skip
"""What `STEP` is called in the records."""

UNTOLD = "digest sketch min max mean n_nan n_posinf n_neginf n_zero n_subnormal n_saturated payload_segment payload_key \
payload_view"

Where = tuple[str, int, str]  # operator, ordinal and slot of what an optimizer wrote
NOWHERE: Where = ("", 0, "")
Param = tuple[str, str]  # scope and slot of a parameter


class Updates:
    """What the optimizers of a capture did."""

    def __init__(self, capture: Capture, dialect: Dialect) -> None:
        self._capture, self._dialect = capture, dialect
        self.unseen: set[tuple[int, int]] = set()  # ranks and steps whose optimizer wrote what no recorded forward reads

    def of(self, table: pa.Table, columns: Sequence[str]) -> pa.Table | None:
        """Return the rows of `STEP` for the steps of a table of records, with these columns and ``neutral``; None: none."""
        optimizer = table.filter(pc.equal(table["phase"].cast(pa.string()), "optimizer"))
        last: dict[tuple[int, int], int] = {}
        for rank, step, seq in zip(*(optimizer[name].to_pylist() for name in ("rank", "step", "seq")), strict=True):
            last[rank, step] = max(seq, last.get((rank, step), -1))
        found = [self._step(rank, step, seq, columns) for (rank, step), seq in last.items()]
        made = [one for one in found if one is not None]
        return pa.concat_tables(made, promote_options="permissive") if made else None

    def _step(self, rank: int, step: int, seq: int, columns: Sequence[str]) -> pa.Table | None:
        wanted = list(dict.fromkeys([*columns, "sketch", "l2", "payload_key", "ordinal", "producer_slot"]))
        read = self._params(rank, [step, step + 1], wanted)
        before, after = _first(read, step), _first(read, step + 1)
        gradients = self._gradients(rank, step, read, before, wanted)
        if not after:
            written = self._written(rank, step, wanted)
            driven = set() if gradients is None else set(gradients[1])
            if not before or before.keys() - written.keys() - self._left_alone(rank, step, read, before, driven):
                self.unseen.add((rank, step))
            if not written:
                return None
            after = {key: len(read) + n for n, key in enumerate(written)}
            read = pa.concat_tables([read, pa.concat_tables(list(written.values()))]).unify_dictionaries()
        rows: list[int] = []
        slots: list[str] = []
        layouts: dict[int, Axes] = {}
        for key in sorted(before.keys() & after.keys()):
            name, axes = self._named(*key, ops=read, at=before[key])
            if name is None:
                continue
            for kind, at in (("input", before[key]), ("output", after[key]), ("step", after[key])):
                if axes is not None:
                    layouts[len(rows)] = axes
                rows.append(at)
                slots.append(f"{kind}.{name}")
        if not rows:
            return None
        made = read.take(pa.array(rows))
        norms = dict(zip(slots[2::3], _apart(read, list(zip(rows[::3], rows[1::3], strict=True))), strict=True))
        made = _with_norms(made, slots, norms)
        if gradients is not None:
            table, names, axes_of = gradients
            layouts |= {len(rows) + n: axes for n, axes in axes_of.items()}
            made, slots = pa.concat_tables([made, table], promote_options="permissive"), [*slots, *names]
        return _as_call(made, slots, layouts, step, seq, columns)

    def _params(self, rank: int, steps: list[int], columns: Sequence[str]) -> pa.Table:
        """Return the parameters that forwards of layers read."""
        read = self._capture.records(list(columns), rank=rank, step=steps, level="module", phase="forward")
        return read.filter(pc.starts_with(read["slot"].cast(pa.string()), "param."))

    def _left_alone(self, rank: int, step: int, read: pa.Table, before: dict[Param, int], driven: set[str]) -> set[Param]:
        """Return the parameters that no optimizer writes: a running mean that Paddle calls one, and a frozen weight, which the step
        before left as it was and which is not ``driven``: gets no gradient."""
        earlier = self._params(rank, [step - 1], ["step", "scope", "slot", "digest"])
        held = {key: earlier["digest"][at] for key, at in _first(earlier, step - 1).items()}
        names = {key: self._named(*key, ops=read, at=at)[0] for key, at in before.items()}
        return {
            key for key, name in names.items()
            if name is None or (f"gradient.{name}" not in driven and read["digest"][before[key]].equals(held.get(key)))
        }  # fmt: skip

    def _written(self, rank: int, step: int, columns: Sequence[str]) -> dict[Param, pa.Table]:
        """Return what the optimizer of a step wrote, by the parameters that the same calls of the step before wrote."""
        params = self._params(rank, [step], columns)
        calls = self._capture.records(list(columns), rank=rank, step=[step - 1, step], phase="optimizer")
        wrote: dict[str | None, Where] = {}
        now: dict[Where, int] = {}
        steps, ops, ordinals, digests = (calls[name].to_pylist() for name in ("step", "op", "ordinal", "digest"))
        for k, slot in enumerate(calls["slot"].to_pylist()):
            key = ops[k], ordinals[k], slot
            if steps[k] == step:
                now[key] = k
            elif slot.startswith("output."):
                wrote[digests[k]] = key if digests[k] is not None else NOWHERE
        found: dict[int, Param] = {}
        # By its bytes, not by its producer: tensors that share memory (Paddle's LSTM) name the last call that wrote to any of it.
        held = params["digest"].to_pylist()
        for param, at in _first(params, step).items():
            k = now.get(wrote.get(held[at], NOWHERE), -1)
            if k >= 0 and k not in found and calls["shape"][k].as_py() == params["shape"][at].as_py():
                found[k] = param
        return {key: calls.slice(k, 1) for k, key in found.items()}

    def _named(self, scope: str, slot: str, *, ops: pa.Table, at: int) -> tuple[str | None, Axes | None]:
        """Return the baseline's name of a parameter (``encoder.fc.weight``), and how its elements lie."""
        found = self._dialect.slot("module", scope, str(ops["op"][at].as_py()), slot)
        if found.name is None:
            return None, None
        plain = self._dialect.scope(scope)
        return f"{plain}.{found.name.removeprefix('param.')}" if plain else found.name.removeprefix("param."), found.axes

    def _gradients(
        self, rank: int, step: int, read: pa.Table, params: dict[Param, int], columns: Sequence[str]
    ) -> tuple[pa.Table, list[str], dict[int, Axes]] | None:
        """Return the gradients of parameters, with their names and layouts."""
        needed = list(dict.fromkeys([*columns, "rank", "step", "seq", "shape", "digest", "forward_seq", "phase", "level"]))
        table = self._capture.records(needed, rank=rank, step=step, level=("module", "api"), phase=("forward", "backward"))
        texts = {name: table[name].cast(pa.string()).to_pylist() for name in ("level", "scope", "op", "slot")}
        found = gradients_of_layers(table, texts, self._dialect)
        names, rows, layouts = list[str](), list[int](), dict[int, Axes]()
        for n, (k, param) in enumerate(zip(found.tensors, found.params, strict=True)):
            name = self._named(*param, ops=read, at=params[param])[0] if param in params else None
            if name is not None:
                layouts |= {len(rows): found.axes[n]} if n in found.axes else {}
                rows.append(k)
                names.append(f"gradient.{name}")
        return (table.select(list(columns)).take(pa.array(rows)), names, layouts) if rows else None


def _first(table: pa.Table, step: int) -> dict[Param, int]:
    """Return where each parameter is first read in a step."""
    found: dict[Param, int] = {}
    scopes, slots = (table[name].cast(pa.string()).to_pylist() for name in ("scope", "slot"))
    for k, (scope, slot, read) in enumerate(zip(scopes, slots, table["step"].to_pylist(), strict=True)):
        if read == step:
            found.setdefault((scope, slot), k)
    return found


def _apart(table: pa.Table, pairs: list[tuple[int, int]]) -> list[float]:
    """Return the norms of what was added to weights, by their sketches."""
    parts = [sketch_rows(chunk) for chunk in table["sketch"].chunks]
    if not parts or not pairs:
        return [float("nan")] * len(pairs)
    rows = np.concatenate([np.where((there[:, None] if there is not None else True), found, np.nan) for found, there in parts])
    first, second = (np.array(side, np.int64) for side in zip(*pairs, strict=True))
    return [float(one) for one in np.atleast_1d(distance(rows[first], rows[second]))]


def _with_norms(table: pa.Table, slots: list[str], norms: dict[str, float]) -> pa.Table:
    """Return rows of which those named ``step.…`` hold nothing but a norm."""
    others = np.array([not slot.startswith("step.") for slot in slots])
    for name in UNTOLD.split():
        if name in table.column_names:
            table = put(table, name, masked(table[name], others))
    l2 = [norms.get(slot, value) for slot, value in zip(slots, table["l2"].to_pylist(), strict=True)]
    return put(table, "l2", pa.array(l2, pa.float64()))


def _as_call(table: pa.Table, slots: list[str], layouts: dict[int, Axes], step: int, seq: int, columns: Sequence[str]) -> pa.Table:
    if layouts:
        table = laid_out(table, layouts)
    fixed = {**OF_STEP, "step": step, "seq": seq, "producer_seq": None, "producer_slot": None, "site": None}
    arrays = {name: table[name] for name in columns} | {"slot": pa.array(slots).dictionary_encode()}
    for name in fixed.keys() & arrays.keys():
        kind = TYPES[name]
        plain = kind.value_type if pa.types.is_dictionary(kind) else kind
        repeated = pa.repeat(pa.scalar(fixed[name], plain), len(table))
        arrays[name] = repeated.dictionary_encode() if pa.types.is_dictionary(kind) else repeated
    arrays[NEUTRAL] = pa.array([STEP] * len(table)).dictionary_encode()
    return pa.table(arrays)
