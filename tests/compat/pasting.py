"""The documents' code, pasted into real training scripts as a reader of them would do it.

A block is pasted as it stands; ``...`` in it, where the document leaves out what a script has anyway, stays in place (it is valid
Python) and what the script has follows it.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from nursery import Child, Nursery

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

CENTERNET = """
import sys
from types import SimpleNamespace

import torch
from apex import amp
from centernet import CenterNet, losses
from data import CLASSES, batches

{imports}

torch.set_num_threads(1)
device, fault = sys.argv[1:]
if device == "npu":
    from trueup import simdev
    simdev.install()
    if fault != "none":
        simdev.inject(fault)
opt = SimpleNamespace(
    arch="centernet", heads=None, head_conv=None, load_local_weights=False, local_weights_path=None, device=device, lr=2e-3,
    precision_mode="must_keep_origin_dtype", num_epochs=1,
)
logger = sys.stdout


def create_model(arch, heads, head_conv, load_local_weights, local_weights_path):
    return CenterNet(classes=len(CLASSES), width=8)


def train(model, optimizer, epoch):
    batch = next(batches(3, epoch, size=64))
    batch = {{name: value.to(opt.device) for name, value in batch.items()}}
    optimizer.zero_grad()
    terms = losses(model(batch["image"]), batch)
    terms["loss"].backward()
    optimizer.step()
    logger.write(f"epoch {{epoch}} loss {{terms['loss'].item()!r}}")


{main}

main()
"""

BERT_CRF = """
import sys
from types import SimpleNamespace

import apex
import torch
from apex import amp
from bert_crf import BertCRF
from data import TAGS, batch, vocabulary
from torch import optim
from transformers.optimization import get_linear_schedule_with_warmup

{imports}

torch.set_num_threads(1)
device = sys.argv[1]
if "npu" in device:
    from trueup import simdev
    simdev.install()
torch.manual_seed(0)
args = SimpleNamespace(lr=1e-3, opt_level="O2", train_epochs=1)
distributed, warm_factor = False, 0.1
train_dataloader = range(3)


class Model(BertCRF):
    def __init__(self):
        super().__init__(len(vocabulary()) + 1, len(TAGS))
        {damage}


{hook}

for step in train_dataloader:
    optimizer.zero_grad()
    loss = model(*(tensor.to(device) for tensor in batch(step)))
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    scheduler.step()
    print(f"step {{step}} loss {{loss.item()!r}}", flush=True)
"""


def blocks(document: str) -> dict[str, str]:
    """Return the code blocks of a document by their names."""
    text = (HERE / "documents" / f"{document}.txt").read_text("utf-8")
    return {name: body for name, _, body in (part.partition("\n") for part in text.split("=== ")[1:])}


def centernet(device: str) -> str:
    """Return the detector's script for a device, whose folder is named as the document advises."""
    pasted = blocks("centernet")
    head, *body = pasted["hook"].replace("./dump_data_new/npu", f"./dump_data_new/{device}").splitlines()
    seed = pasted["seed"].splitlines()
    assert (head, seed[0]) == ("def main():", "def main():")
    loop = pasted["switch"].replace("    ...\n", "    ...\n    train(model, optimizer, epoch)\n")
    main = "\n".join([*seed, *body, textwrap.indent(loop, "    ")])
    return CENTERNET.format(imports=pasted["import"], main=main)


def bert_crf(damage: str) -> str:
    """Return the tagger's script; ``damage`` is what a fine-tuning did to its weights."""
    pasted = blocks("bert_crf")
    return BERT_CRF.format(imports=pasted["import"], hook=pasted["hook"], damage=damage)


def run(nursery: Nursery, script: str, folder: Path, *arguments: str, example: str | None = None) -> Child:
    """Run a script in a folder; ``example``: whose modules it imports."""
    folder.mkdir(parents=True, exist_ok=True)
    compat = ROOT / "compat-packages/src"
    paths = [HERE / "standins", compat, compat / "trueup_compat/old_names", *([ROOT / "examples" / example] if example else [])]
    header = f"import os, sys\nos.chdir({str(folder)!r})\nsys.path[:0] = {list(map(str, paths))!r}\n"
    file = folder / f"script-{len(list(folder.glob('script-*')))}.py"
    file.write_text(header + script, "utf-8")
    return nursery.script(file.with_suffix(".log"), file, *arguments)
