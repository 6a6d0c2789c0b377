"""A model as ONNX, and the proof that it computes the same: outputs over several inputs and batch sizes, else the first node that
differs. Imported by the doors alone."""

from trueup.migration.export.exporting import Exported, export

__all__ = ["Exported", "export"]
