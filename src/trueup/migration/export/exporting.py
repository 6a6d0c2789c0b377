"""`trueup export`: a model of a script becomes ONNX, is run by onnxruntime beside the framework, and is judged.

    model.py     def make(): return Net(), (torch.randn(2, 8),)        a model and inputs of its real shape
    trueup export model.py:make -o net.onnx

Node by node: what onnxruntime makes of the framework's values before a node, and what a fresh export writes there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import clean, counted, first_line, sci
from trueup.migration.export.capturing import NARROW, ROUNDED, Call, Values, widened, write

OUTPUT = 1e-4
"""Relative L2 error of an output up to which it is the same: the porting guide's criterion for whole networks, a mean absolute
difference of at most 1e-4, by the output's size. A model in float16 is itself further from its float64 self: `OWN` times that."""
OWN = 3.0  # each of two runs that round alike may be that far from the exact result, in any direction, and a half more
ATC_OPSET = 11  # the porting guide (CANN 5): "ATC supports only 11"; later versions take more
ATC_TYPES = ("DOUBLE", "COMPLEX64", "COMPLEX128", "STRING")  # the guide's toolkit has no kernels for them
FX = re.compile(r".*target=torch\.ops\.(\w+)\.(\w+).*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Run:
    """One comparison: batch size, the largest relative L2 error of the outputs (infinite where shapes or NaN differ), and the error
    up to which they are the same."""

    batch: int
    error: float
    limit: float = OUTPUT


@dataclass(frozen=True)
class Exported:
    """What came of an export. ``differ``: nodes that differ, in the file's order; ``judged``: how many values were judged, and how
    many ``outputs`` the file has; ``unjudged``: why none was; ``atc``: what the ATC of the porting guide would not take."""

    file: Path
    opset: int
    dynamic: bool
    chosen: str
    nodes: int
    runs: tuple[Run, ...]
    differ: tuple[Node, ...]
    judged: int
    outputs: int
    unjudged: str
    atc: tuple[str, ...]

    @property
    def first(self) -> Node | None:
        """Return the first node that is wrong; else the first that may be."""
        return next((node for node in self.differ if node.word == "wrong"), next(iter(self.differ), None))

    @property
    def exit_code(self) -> int:
        """0: the same numbers, node by node; 1: others; 2: it could not be told."""
        if any(node.word == "wrong" for node in self.differ) or any(run.error > run.limit for run in self.runs):
            return 1
        return 2 if self.differ or self.unjudged else 0

    @property
    def sentence(self) -> str:
        """Return whether the file computes what the model does."""
        worst = max(run.error for run in self.runs)
        sizes = ", ".join(dict.fromkeys(str(run.batch) for run in self.runs))
        inputs = f"{counted(len(self.runs), 'input')}, batch sizes {sizes}, largest error {sci(worst)}"
        first = self.first
        if self.exit_code == 1:
            text = f"{self.file.name} does not compute what the model does (error {sci(worst)})"
            if first is None:
                return f"{text}; {self.unjudged or 'no node differs by itself: the nodes after each other enlarge rounding'}."
            return clean(f"{text}: the first node that differs is {_named(first)}, {first.why}.")
        if self.unjudged:
            return clean(f"{self.file.name} may compute what the model does ({inputs}): {self.unjudged}.")
        if first is not None:
            text = f"{self.file.name} may not compute what the model does ({inputs})"
            return clean(f"{text}: look at {_named(first)}; {_doubt(first)}.")
        return f"{self.file.name} computes what the model does, {'output by output' if self.coarse else 'node by node'}: {inputs}."

    @property
    def coarse(self) -> bool:
        """Tell whether the outputs alone were judged, because the file's nodes bear no names of the model's."""
        return self.judged <= self.outputs < self.nodes

    def document(self) -> dict[str, Any]:
        """Return all of it as JSON-ready data."""
        first = None if self.first is None else asdict(self.first)
        return {
            "schema": "trueup-export", "schema_version": 1, "sentence": self.sentence, "file": str(self.file), "opset": self.opset,
            "dynamic": self.dynamic, "chosen": self.chosen, "nodes": self.nodes, "judged": self.judged, "unjudged": self.unjudged,
            "first": first, "differ": [asdict(node) for node in self.differ], "atc": list(self.atc),
            "runs": [{"batch": run.batch, "error": run.error, "limit": run.limit} for run in self.runs],
        }  # fmt: skip


def export(
    model: str, output: Path, *, opset: int | None = None, check: bool = False, capture: Path | None = None
) -> Exported:
    """Export a model and prove it.

    Args:
        model: ``FILE.py:NAME``, where NAME is, or gives, a model and its inputs (tensors on the CPU).
        output: the file to write.
        opset: a version of ONNX's operators; None for that of torch.onnx.
        check: ``output`` is there already; nothing is written.
        capture: a new folder, where the values of all nodes are kept: those of the framework, and those of onnxruntime.

    Raises:
        TrueupError: the model cannot be made or exported, the file cannot be read, or onnxruntime is missing.
    """
    onnx, runtime = _packages()
    from trueup.recording.adapters.torch.exporting import Model

    script, _, name = model.rpartition(":")
    if not Path(script).is_file():
        raise _refused(model, "FILE.py:NAME, a script and a name in it", "no such file")
    try:
        made = Model(Path(script), name)
    except Exception as error:  # noqa: BLE001 - of the user's code, torch.onnx or onnxruntime
        raise _refused(model, "a model and a tuple of its inputs, or a function that returns both", first_line(error)) from None
    chosen = "the file that is there" if check else _written(made, output, opset)
    try:
        proto = onnx.load(str(output))
        onnx.checker.check_model(proto)
    except Exception as error:  # noqa: BLE001 - of the user's code, torch.onnx or onnxruntime
        raise _refused(str(output), "a sound ONNX file", first_line(error)) from None
    version = next((one.version for one in proto.opset_import if one.domain in ("", "ai.onnx")), 0)
    if opset not in (None, version):
        raise _refused(str(output), f"opset {opset}", f"opset {version}, from which torch.onnx could not convert this model")
    dynamic = any(axis.dim_param for one in proto.graph.input for axis in one.type.tensor_type.shape.dim[:1])
    batches = [1, made.batch + 1] if dynamic and made.batch else [made.batch] if made.batch else []
    variants = made.variants(batches)
    session = Session(onnx, runtime, proto)
    chosen += f"; {ROUNDED}" if session.narrow else ""
    runs = tuple(_compared(made, session, one) for one in variants)
    differ, judged, unjudged = _judged(onnx, runtime, proto, made, variants, dynamic=dynamic, capture=capture, fresh=check)
    atc = tuple(_atc(onnx, proto, version, dynamic=dynamic))
    nodes, outputs = len(proto.graph.node), len(proto.graph.output)
    return Exported(output, version, dynamic, chosen, nodes, runs, tuple(differ), judged, outputs, unjudged, atc)


def _compared(made: Any, session: Any, inputs: Sequence[Any]) -> Run:
    right = made.outputs(inputs)
    apart, limit = _apart(right, _run(session, made.arrays(inputs))), OUTPUT
    if apart > limit:
        try:
            limit = max(limit, OWN * _apart(made.exact(inputs), right))
        except Exception:  # noqa: BLE001 - of the user's code: it cannot be run in float64
            limit = OUTPUT
    return Run(_batch(inputs), apart, limit if np.isfinite(limit) else OUTPUT)


def _judged(
    onnx: Any, runtime: Any, proto: Any, made: Any, variants: Sequence[Any], *, dynamic: bool, capture: Path | None, fresh: bool
) -> tuple[list[Node], int, str]:
    """Return the nodes that differ, how many values were judged, or why none could be; write both captures."""
    try:
        graph = made.graph(dynamic=dynamic)
    except Exception as error:  # noqa: BLE001 - of the user's code, or torch.onnx
        return [], 0, f"its nodes cannot be judged, because torch.onnx does not export the model: {first_line(error)}"
    texts = {name: property_of(node, "fx_node") for node in proto.graph.node for name in node.output if name}
    names = {name: one for name, one in graph.named(texts, [one.name for one in proto.graph.output]).items() if name in texts}
    executed = graph.run(variants[0], names)
    found = _found(onnx, runtime, proto, made.arrays(variants[0]), texts if capture else executed.values)
    if capture is not None:
        given = dict(zip((one.name for one in proto.graph.input), made.arrays(variants[0]), strict=False))
        held = {one.name: onnx.numpy_helper.to_array(one) for one in proto.graph.initializer}
        write(capture / "framework", "cpu", _calls(proto, executed.values, nodes=False), given | executed.values)
        write(capture / "onnxruntime", "onnxruntime", _calls(proto, executed.values, nodes=True), held | given | found)
    names = {name: names[name] for name, one in executed.values.items() if found[name].dtype == one.dtype}
    runs = [(made.arrays(inputs), graph.run(inputs, names)) for inputs in variants]
    if not names:
        return [], 0, "its nodes cannot be judged, because none of its values is one of the model's"

    def run(model: Any, feeds: Any) -> list[np.ndarray[Any, Any]]:
        return _run(Session(onnx, runtime, model), feeds)

    return differing(onnx, proto, run, runs, fresh=made.proto(dynamic=dynamic) if fresh else None), len(names), ""


def _packages() -> tuple[Any, Any]:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 - torch.onnx needs it
    except ImportError as error:
        raise TrueupError(
            "ONNX cannot be written or run here.\n  expected: the packages onnx, onnxscript and onnxruntime\n"
            f"  got:      {first_line(error)}\n  next:     pip install 'trueup[onnx]'"
        ) from None
    return onnx, onnxruntime


def _refused(where: str, expected: str, got: str) -> TrueupError:
    return TrueupError(
        f"The model cannot be exported.\n  where:    {where}\n  expected: {expected}\n  got:      {got}\n"
        "  next:     correct it; docs/export.md"
    )


def _written(made: Any, output: Path, opset: int | None) -> str:
    """Write the file, with a batch of any size if the model can; return what was chosen, in words."""
    said = "opset by torch.onnx" if opset is None else f"opset {opset} as asked"
    why = "" if made.batch else "the inputs have no first axis in common"
    if not why:
        try:
            made.export(output, opset, dynamic=True)
            return f"{said}; the first axis of each input is free (batch)"
        except Exception as error:  # noqa: BLE001 - of the user's code, torch.onnx or onnxruntime
            why = first_line(error)
    try:
        made.export(output, opset, dynamic=False)
    except Exception as error:  # noqa: BLE001 - of the user's code, torch.onnx or onnxruntime
        raise _refused(str(output), "a model that torch.onnx can export", first_line(error)) from None
    return f"{said}; all axes are fixed, because a free batch failed: {why}"


class Session:
    """One model in onnxruntime, its nodes as they are named; values in bfloat16 go in and come out as such."""

    def __init__(self, onnx: Any, runtime: Any, proto: Any) -> None:
        options = runtime.SessionOptions()
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 3
        try:
            model, self.narrow = widened(onnx, proto)
            self._session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # noqa: BLE001 - of the user's code, torch.onnx or onnxruntime
            raise _refused("onnxruntime", "a model that it can run on the CPU", first_line(error)) from None
        self.inputs = [one.name for one in self._session.get_inputs()]
        self.outputs = [one.name for one in self._session.get_outputs()]

    def run(self, inputs: Values) -> list[np.ndarray[Any, Any]]:
        """Return the outputs; raises what onnxruntime raises."""
        given = {name: one.astype(np.float32) if one.dtype == NARROW else one for name, one in inputs.items()}
        made = self._session.run(None, given)
        return [one.astype(NARROW) if name in self.narrow else one for name, one in zip(self.outputs, made, strict=True)]


def _run(session: Session, inputs: Sequence[np.ndarray[Any, Any]] | Values) -> list[np.ndarray[Any, Any]]:
    try:
        if not isinstance(inputs, Mapping):
            inputs = dict(zip(session.inputs, inputs, strict=True))
        return session.run(inputs)
    except Exception as error:  # noqa: BLE001 - of the user's code, torch.onnx or onnxruntime
        raise _refused("onnxruntime", "inputs that the file takes", first_line(error)) from None


def _batch(inputs: Sequence[Any]) -> int:
    return int(inputs[0].shape[0]) if inputs and inputs[0].ndim else 0


def _apart(right: Sequence[np.ndarray[Any, Any]], found: Sequence[np.ndarray[Any, Any]]) -> float:
    if len(right) != len(found):
        return float("inf")
    return max((error(one, other) for one, other in zip(right, found, strict=True)), default=0.0)


def error(right: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> float:
    """Return ‖found − right‖ / ‖right‖; infinite where shapes or what is not finite differ, or integers do."""
    if right.shape != found.shape:
        return float("inf")
    one, other = right.astype(np.float64), found.astype(np.float64)
    finite = np.isfinite(one)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True) or not np.isfinite(other[finite]).all():
        return float("inf")
    apart, size = np.linalg.norm(other[finite] - one[finite]), np.linalg.norm(one[finite])
    if right.dtype.kind in "iub":
        return float("inf") if apart else 0.0
    return float(apart / size) if size else float(apart)


def _found(onnx: Any, runtime: Any, proto: Any, inputs: Sequence[Any], names: Iterable[str]) -> Values:
    """Return what onnxruntime makes of the inputs, by name."""
    more, names = onnx.ModelProto(), list(names)
    more.CopyFrom(proto)
    del more.graph.output[:]
    more.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    return dict(zip(names, _run(Session(onnx, runtime, more), inputs), strict=True))


def _calls(proto: Any, right: Values, *, nodes: bool) -> list[Call]:
    """Return the framework's nodes: each reads the named values from which ONNX's nodes, taken together, make its own; and with
    ``nodes`` ONNX's, too."""
    makers = {name: node for node in proto.graph.node for name in node.output}
    known = {*right, *(one.name for one in proto.graph.input)}

    def read(node: Any) -> list[str]:
        names = [[name] if name in known else read(makers[name]) if name in makers else [] for name in node.input]
        return list(dict.fromkeys(name for one in names for name in one))

    found = []
    for node in proto.graph.node:
        for name in node.output:
            if name in right:
                modules = re.findall(r"'([^']*)'", property_of(node, "name_scopes"))[:-1]
                op = FX.sub(r"\1::\2", property_of(node, "fx_node"))
                scope, source = modules[-1] if modules else "", line(property_of(node, "stack_trace"))
                found.append(Call("api", scope, op, source, tuple(read(node)), (name,)))
        if nodes:
            given, made = (tuple(filter(None, names)) for names in (node.input, node.output))
            found.append(Call("aten", node.name, f"onnx::{node.op_type}", line(property_of(node, "stack_trace")), given, made))
    return found


def _named(node: Node) -> str:
    where = f" ({node.source})" if node.source else ""
    told = f", where {'; '.join(node.settings)}" if node.settings else ""
    return f"{node.name}, {node.op}{where}{told}"


def _doubt(node: Node) -> str:
    return "these inputs do not show it" if node.word == "setting" else node.why


def _atc(onnx: Any, proto: Any, opset: int, *, dynamic: bool) -> list[str]:
    """Return what the porting guide's ATC does not take, or takes with an option."""
    said = []
    if opset != ATC_OPSET:
        takes = f"the guide's ATC (CANN 5) takes {ATC_OPSET} alone"
        said.append(f"opset {opset}: {takes}; later ones take more")
    if dynamic:
        said.append("a free batch: give ATC --dynamic_batch_size or --input_shape")
    kinds = {one.type.tensor_type.elem_type for one in (*proto.graph.input, *proto.graph.output)}
    kinds |= {one.data_type for one in proto.graph.initializer}
    names = {onnx.TensorProto.DataType.Name(kind) for kind in kinds if kind}
    wide = sorted(names.intersection(ATC_TYPES))
    if wide:
        said.append(f"tensors of {', '.join(wide)}: cast them")
    domains = sorted({node.domain for node in proto.graph.node} - {"", "ai.onnx"})
    if domains:
        said.append(f"operators of {', '.join(domains)}, which need plug-ins")
    return said


MADE = "/made of the framework's values"
LINE = re.compile(r'File "([^"]+)", line (\d+)')
APART = 1e-6
"""Relative difference from which two settings are not the same: the export writes float32, whose rounding is 6e-8."""

Execute = Callable[[Any, Mapping[str, Any]], list[np.ndarray[Any, Any]]]
Inputs = Sequence[np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Node:
    """A node that differs: its name in the file, operator, line of the model, relative error of what it makes of the framework's
    values, the judge's word (`wrong`, `suspicious`, or `setting`: only its settings differ) and sentence, and its settings that a
    fresh export writes otherwise."""

    name: str
    op: str
    source: str
    error: float
    word: str
    why: str
    settings: tuple[str, ...]


def differing(onnx: Any, proto: Any, run: Execute, executed: Sequence[tuple[Inputs, Any]], *, fresh: Any) -> list[Node]:
    """Return the nodes that differ, in the file's order.

    Args:
        onnx: the package.
        proto: the file; ``run(model, feeds)`` gives the outputs of one like it.
        executed: inputs, and the framework's run of them (`recording.adapters.torch.exporting.GraphRun`).
        fresh: what an export of the model gives now; None: that is the file.
    """
    makers = {name: node for node in proto.graph.node for name in node.output}
    names = [name for name in makers if all(name in one.values for _, one in executed)]
    cut = _cut(onnx, proto, {name: executed[0][1].values[name] for name in names})
    worst: dict[str, Any] = {}
    for inputs, one in executed:
        given = dict(zip((info.name for info in proto.graph.input), inputs, strict=False))
        for name, made in zip(names, run(cut, given | {name: one.values[name] for name in names}), strict=True):
            found = one.judge(name, made)
            if found is None or found.verdict in ("wrong", "suspicious"):
                before = worst.get(name)
                if name not in worst or (before is not None and (found is None or found.excess > before.excess)):
                    worst[name] = found
    told = {} if fresh is None else settings(onnx, proto, fresh)
    inside = {} if fresh is None else _other_operators(fresh, makers, set(names), worst)
    worst |= {name: worst[into] for name, (into, _) in inside.items()}
    told |= {name: (*told.get(name, ()), said) for name, (_, said) in inside.items()}
    return [_node(name, makers[name], worst, told, one) for name in makers if name in worst or name in told]


def _other_operators(
    fresh: Any, makers: Mapping[str, Any], judged: set[str], worst: Mapping[str, Any]
) -> dict[str, tuple[str, str]]:
    """Return, by first outputs, nodes of other operators than those of these names in a fresh export: into which judged value that
    differs each goes, and what is said of it. Another operator that changes no number is another form, and no fault."""
    new = {node.output[0]: node.op_type for node in fresh.graph.node if node.output}
    found: dict[str, tuple[str, str]] = {}
    for into in worst:
        waiting, seen = [into], {into}
        while waiting:
            name = waiting.pop()
            node = makers.get(name)
            if node is None:
                continue
            if name == node.output[0] and new.get(name, node.op_type) != node.op_type:
                found[name] = into, f"it is {node.op_type}, a fresh export has {new[name]}"
            more = [one for one in node.input if one not in judged and one not in seen]
            seen.update(more)
            waiting += more
    return found


def _node(name: str, node: Any, worst: Mapping[str, Any], settings: Mapping[str, tuple[str, ...]], run: Any) -> Node:
    source = line(property_of(node, "stack_trace")) or line(run.line(name))
    told = settings.get(name, ())
    if name not in worst:
        return Node(node.name or name, node.op_type, source, 0.0, "setting", "", told)
    found = worst[name]
    if found is None:
        return Node(node.name or name, node.op_type, source, float("inf"), "wrong", "its shape or dtype is another", told)
    sentence = found.sentence.replace("the baseline", "the framework")
    return Node(node.name or name, node.op_type, source, found.error, found.verdict, sentence, told)


def _cut(onnx: Any, proto: Any, values: Values) -> Any:
    """Return a model in which each node reads what it is given of ``values``, and not what the nodes before it make."""
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    for node in model.graph.node:
        node.output[:] = [name + MADE if name in values else name for name in node.output]
    del model.graph.output[:], model.graph.value_info[:]
    kind = onnx.helper.np_dtype_to_tensor_dtype
    model.graph.input.extend(onnx.helper.make_tensor_value_info(name, kind(one.dtype), None) for name, one in values.items())
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name + MADE) for name in values)
    return model


def settings(onnx: Any, proto: Any, fresh: Any) -> dict[str, tuple[str, ...]]:
    """Return, by a node's first output, numbers that it has otherwise than the node of that name and operator in a fresh export:
    attributes, and constants that it reads."""
    held, new = ({one.name: one for one in model.graph.initializer} for model in (proto, fresh))
    nodes = {node.output[0]: node for node in fresh.graph.node if node.output}

    def array(one: Any) -> Any:
        held = onnx.numpy_helper.to_array(one)
        return held.astype(np.float32) if held.dtype == NARROW else held

    def of(node: Any, other: Any) -> Iterator[str]:
        before = {one.name: onnx.helper.get_attribute_value(one) for one in other.attribute}
        for one in node.attribute:
            value = onnx.helper.get_attribute_value(one)
            if isinstance(value, float | bytes) and one.name in before and not _alike(value, before[one.name]):
                yield f"{one.name} is {_text(value)}, a fresh export has {_text(before[one.name])}"
        for at, (name, was) in enumerate(zip(node.input, other.input, strict=False)):
            if name in held and was in new and not _alike(a := array(held[name]), b := array(new[was])):
                both = f"is {_text(a)}, a fresh export has {_text(b)}" if a.size == b.size == 1 else "is not that of a fresh export"
                yield f"input {at} ({name}) {both}"

    pairs = [(node.output[0], node, nodes[node.output[0]]) for node in proto.graph.node if node.output and node.output[0] in nodes]
    found = {name: tuple(of(node, other)) for name, node, other in pairs if node.op_type == other.op_type}
    return {name: told for name, told in found.items() if told}


def _alike(one: Any, other: Any) -> bool:
    """Tell whether two settings are the same, as far as they are words or floating-point numbers in the same form."""
    a, b = np.asarray(one), np.asarray(other)
    if a.dtype.kind != "f" or b.dtype.kind != "f":
        return a.dtype.kind != "S" or bool(one == other)
    if a.size == b.size == 1:
        a, b = a.reshape(()), b.reshape(())
    return a.shape != b.shape or bool(np.allclose(a.astype(np.float64), b.astype(np.float64), rtol=APART, atol=0, equal_nan=True))


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return f"{float(np.asarray(value).reshape(-1)[0]):.7g}"


def line(stack: str) -> str:
    """Return the model's line of a stack: the innermost of yours, else of a library, else of PyTorch."""
    frames = LINE.findall(stack)
    own = [frame for frame in frames if "-packages/" not in frame[0]]
    libraries = [frame for frame in frames if "-packages/torch/" not in frame[0]]
    return ":".join((own or libraries or frames)[-1]) if frames else ""


def property_of(node: Any, name: str) -> str:
    """Return what torch.onnx keeps of a node."""
    return next((str(one.value) for one in node.metadata_props if one.key == f"pkg.torch.onnx.{name}"), "")
