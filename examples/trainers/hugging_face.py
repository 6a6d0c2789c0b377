"""The Hugging Face Trainer, with accumulation, evaluation and checkpoints: `python hugging_face.py`.

With `--capture DIR` the trainer gets a callback that records the run.
"""

from __future__ import annotations

import argparse
import tempfile

from task import LENGTH, Manual
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments, set_seed

import trueup


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--capture", metavar="DIR")
    args = parser.parse_args()
    set_seed(1234)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2))
    model.loss_type = "ForCausalLM"  # what it falls back to with a warning
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder, max_steps=args.steps, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=3e-3,
            eval_strategy="steps", eval_steps=2, save_steps=3, logging_steps=1, dataloader_num_workers=args.workers,
            use_cpu=True, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, options, train_dataset=Manual("typesseq"), eval_dataset=Manual("assert"))
        trainer.remove_callback(PrinterCallback)  # it prints how long things took
        if args.capture:
            trainer.add_callback(trueup.TrainerCallback(args.capture))
        trainer.train()
        for entry in trainer.state.log_history:
            print(*(f"{key} {entry[key]!r}" for key in ("step", "loss", "grad_norm", "eval_loss") if key in entry), flush=True)


if __name__ == "__main__":
    main()
