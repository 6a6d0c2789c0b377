"""The two tables of the simulated device: faults, which a tool has to blame, and noise, which no tool may blame.

Pure data, readable without PyTorch. What a row does to the numbers is in `trueup.simdev.faults` (one function a row,
under the row's name) and `trueup.simdev.differences`.
"""

from __future__ import annotations

from dataclasses import dataclass

from trueup.foundation.model import Phase


@dataclass(frozen=True, slots=True)
class Fault:
    """A way in which the device computes a wrong result."""

    name: str
    ops: tuple[str, ...]
    """Dispatcher operators it touches, as a TorchDispatchMode sees them on npu: ``aten::add_.Tensor``."""
    phase: Phase
    """Where it shows first."""
    what: str
    """What is wrong, in one sentence."""
    blame: str
    """Which call is to blame, in one sentence."""
    gated: bool = False
    """The fault acts in its phase only; otherwise wherever the operator runs."""

    @property
    def op(self) -> str:
        """The operators in one string."""
        return ", ".join(self.ops)


@dataclass(frozen=True, slots=True)
class Noise:
    """A legitimate difference between devices: other rounding, the same mathematics."""

    name: str
    ops: tuple[str, ...]
    phase: Phase
    what: str
    blame: str
    bound: float
    """Relative L2 error that one call may show against the CPU in float32, on well conditioned inputs."""

    @property
    def op(self) -> str:
        """The operators in one string."""
        return ", ".join(self.ops)


_MATMULS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")
_ATTENTION = "aten::_scaled_dot_product_fused_attention_overrideable"
_MASKED_FILLS = tuple(
    f"aten::{name}.{kind}" for name in ("masked_fill", "masked_fill_") for kind in ("Scalar", "Tensor")
)
_INDEX_PUTS = ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put")

_FAULTS = (
    # Recurrent cells
    Fault("lstm-backward-cell-gate", ("aten::_thnn_fused_lstm_cell_backward_impl",), "backward",
          "The cell gate's gradient is multiplied by the derivative of a sigmoid instead of that of a tanh.",
          "The LSTM's cell backward; its incoming gradients are right, the gate gradients it returns are not."),
    Fault("gru-backward-reset-gate", ("aten::_thnn_fused_gru_cell_backward",), "backward",
          "The gradient of the reset gate is zero.",
          "The GRU's cell backward, in the first third of both gate gradients."),
    # Normalisation
    Fault("layer-norm-epsilon", ("aten::native_layer_norm",), "forward",
          "Normalises with eps = 1e-3, whatever eps was asked for.",
          "The layer norm's forward: output and rstd are too small wherever the variance is small."),
    Fault("layer-norm-backward", ("aten::native_layer_norm_backward",), "backward",
          "The input gradient lacks the term that projects out the normalised input.",
          "The layer norm's backward; its weight and bias gradients are right."),
    Fault("batch-norm-running-variance-biased", ("aten::native_batch_norm",), "forward",
          "The running variance is updated with the biased variance (n instead of n - 1).",
          "The batch norm's forward, by what it leaves in running_var; its outputs are right until evaluation."),
    Fault("batch-norm-backward", ("aten::native_batch_norm_backward",), "backward",
          "The input gradient lacks the term that projects out the normalised input.",
          "The batch norm's backward; its weight and bias gradients are right."),
    Fault("group-norm-unbiased-variance", ("aten::native_group_norm",), "forward",
          "Divides by the unbiased standard deviation (n - 1 instead of n).",
          "The group norm's forward: output and rstd."),
    Fault("rsqrt-newton-short", ("aten::rsqrt",), "forward",
          "One Newton step short: a relative error near 1e-3.",
          "The reciprocal square root, as in RMSNorm."),
    # Activations and softmax
    Fault("gelu-tanh-for-erf", ("aten::gelu", "aten::gelu_backward"), "forward",
          "Computes the tanh approximation where the exact GELU was asked for, in both directions.",
          "The first GELU forward; each GELU backward as well."),
    Fault("gelu-backward", ("aten::gelu_backward",), "backward",
          "The derivative lacks the term x times the density.",
          "The GELU's backward."),
    Fault("silu-backward", ("aten::silu_backward",), "backward",
          "The derivative is sigmoid(x) alone.",
          "The SiLU's backward."),
    Fault("relu-backward-at-zero", ("aten::threshold_backward",), "backward",
          "Lets the gradient pass where the activation is exactly zero.",
          "The ReLU's backward."),
    Fault("tanh-table-lookup", ("aten::tanh",), "forward",
          "Interpolates a table with steps of 1/16: a relative error near 1e-3.",
          "The tanh's forward."),
    Fault("softmax-backward", ("aten::_softmax_backward_data",), "backward",
          "Drops the sum term: returns grad * output.",
          "The softmax's backward."),
    Fault("log-softmax-backward", ("aten::_log_softmax_backward_data",), "backward",
          "Subtracts half of the sum term.",
          "The log-softmax's backward, under cross entropy."),
    Fault("log-softmax-half-sum", ("aten::_log_softmax",), "forward",
          "Keeps the sum of exponentials in float16.",
          "The log-softmax's forward."),
    Fault("dropout-no-rescale", ("aten::native_dropout",), "forward",
          "Does not divide what it keeps by 1 - p.",
          "The dropout's forward; its mask is right."),
    # Matrix products, attention, convolution
    Fault("addmm-bf16-accumulation", ("aten::addmm",), "forward",
          "Accumulates in bfloat16 when K is a multiple of 64, and only then.",
          "The linear layers of that shape."),
    Fault("matmul-large-k", _MATMULS, "forward",
          "Drops the part of the inner dimension beyond 512.",
          "The first matrix product with K > 512, in either direction."),
    Fault("attention-scale", (_ATTENTION,), "forward",
          "Scales the scores by 1/d instead of 1/sqrt(d).",
          "The attention's forward."),
    Fault("attention-backward-query-scale", (f"{_ATTENTION}_backward",), "backward",
          "The query gradient is not multiplied by the scale.",
          "The attention's backward, in the query gradient only."),
    Fault("conv-weight-grad-last-tile", ("aten::convolution_backward",), "backward",
          "The weight gradient misses the last sample of the batch.",
          "The convolution's backward, in the weight gradient only."),
    Fault("conv-padding-replicates-edge", ("aten::convolution",), "forward",
          "Pads with the edge value instead of zero.",
          "The first padded convolution's forward."),
    Fault("products-saturate-65504", _MATMULS, "forward",
          "Float16 products stop at 65504, as on a device in saturation mode; NaN stays.",
          "The product whose true result is larger: it is finite, and no NaN follows."),
    # Reductions, pooling, resampling, loss
    Fault("sum-saturates-65504", ("aten::sum", "aten::sum.dim_IntList"), "forward",
          "The result stops at 65504, the largest float16.",
          "The sum whose true result is larger."),
    Fault("cumsum-block-restart", ("aten::cumsum",), "forward",
          "Starts again from zero after every 8 elements.",
          "The cumulative sum."),
    Fault("argmax-ties", ("aten::argmax", "aten::max.dim"), "forward",
          "Returns the last of equal maxima instead of the first.",
          "The argmax, by its indices."),
    Fault("max-pool-ties", ("aten::max_pool2d_with_indices",), "forward",
          "Remembers the last of equal maxima, so the gradient goes elsewhere.",
          "The max pool's forward, by its indices; its values are right."),
    Fault("avg-pool-count-include-pad", ("aten::avg_pool2d",), "forward",
          "Always counts the padding, as if count_include_pad were True.",
          "The average pool's forward, along the border."),
    Fault("upsample-align-corners", ("aten::upsample_bilinear2d", "aten::upsample_bilinear2d.vec"), "forward",
          "Aligns corners though asked not to.",
          "The bilinear interpolation's forward."),
    Fault("cross-entropy-ignore-index", ("aten::nll_loss_forward", "aten::nll_loss2d_forward"), "forward",
          "Counts the positions marked with ignore_index, as class 0.",
          "The negative log likelihood: loss and total weight."),
    # Indexing
    Fault("embedding-backward-duplicates", ("aten::embedding_dense_backward",), "backward",
          "Of several gradients for one row, only the last is kept.",
          "The embedding's backward."),
    Fault("index-put-accumulate-lost", _INDEX_PUTS, "backward",
          "Overwrites where it was asked to accumulate.",
          "The index_put with accumulate=True, usually the backward of advanced indexing."),
    Fault("scatter-add-duplicates", ("aten::scatter_add", "aten::scatter_add_"), "backward",
          "Of several values for one place, only the last is added.",
          "The scatter_add, usually the backward of gather."),
    Fault("masked-fill-last-column", _MASKED_FILLS, "forward",
          "Leaves the last element of each row unfilled.",
          "The masked_fill, usually that of an attention mask."),
    # Memory
    Fault("transposed-view-copy", ("aten::clone",), "forward",
          "A copy of a transposed view reads the memory in its own order, ignoring the strides.",
          "The clone behind contiguous() or reshape()."),
    Fault("stale-buffer-reuse", ("aten::add.Tensor",), "forward",
          "From its second call of a shape on, the last quarter of the output is what the call before left there.",
          "The first forward addition that repeats a shape.", gated=True),
    # Optimizers (one-tensor and foreach forms)
    Fault("adam-epsilon-inside-root", ("aten::add_.Tensor", "aten::_foreach_add_.Scalar"), "optimizer",
          "Adds eps under the root: sqrt(v + eps) instead of sqrt(v) + eps.",
          "The in-place addition of eps in Adam, AdamW, Adagrad or RMSprop.", gated=True),
    Fault("adam-second-moment-value", ("aten::addcmul_", "aten::_foreach_addcmul_.Scalar"), "optimizer",
          "Ignores value: the squared gradient enters with weight 1 instead of 1 - beta2.",
          "The in-place addcmul of Adam, AdamW or RMSprop.", gated=True),
    Fault("sgd-momentum-dampened", ("aten::add_.Tensor", "aten::_foreach_add_.List"), "optimizer",
          "Adds nine tenths of the gradient to the momentum buffer.",
          "The in-place addition to the momentum buffer of SGD, from its second step on.", gated=True),
)  # fmt: skip

_NOISE = (
    Noise("hf32-matmul", (*_MATMULS, "aten::convolution", "aten::convolution_backward"), "forward",
          "Rounds float32 inputs of products to 10 mantissa bits, to nearest, as TF32 does (HF32 is no coarser).",
          "Nobody: torch.npu.matmul.allow_hf32 and torch.npu.conv.allow_hf32 say so while it is on.", 2e-3),
    Noise("reordered-reductions",
          (*_MATMULS, "aten::sum", "aten::sum.dim_IntList", "aten::mean", "aten::mean.dim", "aten::native_layer_norm",
           "aten::_softmax", "aten::_log_softmax", "aten::native_batch_norm"), "forward",
          "Adds the same terms in another order.",
          "Nobody: floating-point addition does not associate.", 1e-5),
    Noise("fused-multiply-add",
          ("aten::addmm", "aten::addcmul", "aten::addcmul_", "aten::add.Tensor", "aten::add_.Tensor",
           "aten::_foreach_addcmul_.Scalar", "aten::_foreach_add_.List"), "forward",
          "Multiplies and adds with a single rounding.",
          "Nobody: it is the more exact result.", 1e-6),
    Noise("lstm-decomposition", ("aten::_thnn_fused_lstm_cell", "aten::_thnn_fused_lstm_cell_backward_impl"), "forward",
          "Adds gates and biases in another order and computes the sigmoid from tanh.",
          "Nobody: the same formulas, arranged differently.", 1e-5),
)  # fmt: skip

FAULTS: dict[str, Fault] = {row.name: row for row in _FAULTS}
NOISE: dict[str, Noise] = {row.name: row for row in _NOISE}
