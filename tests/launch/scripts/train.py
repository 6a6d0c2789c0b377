"""Train three steps of a tiny model; the first argument says how it ends, or what else it does."""

import os
import signal
import sys
import time

import torch

how = sys.argv[1] if len(sys.argv) > 1 else ""
if how == "kill":  # before the first flush, however slow the machine
    from trueup.recording.recorder import flusher

    flusher.FLUSH_SECONDS = 3600.0
if how == "no room":  # for any file beyond 8 KB
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
torch.manual_seed(0)
model = torch.nn.Sequential()
model.add_module("neck", torch.nn.Linear(4, 8))
model.add_module("head", torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps = 10**9 if how in ("forever", "patiently") else 3
if how == "patiently":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
for step in range(steps):
    loss = model(torch.randn(3, 4)).square().mean()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, flush=True)
    if steps > 3:
        time.sleep(0.02)  # few steps, soon read
if how == "raise":
    raise ValueError("the last batch is broken")
if how == "exit":
    sys.exit(3)
if how == "_exit":
    os._exit(0)
