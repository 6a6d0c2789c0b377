"""What kind of process this is can be told from its command line."""

from __future__ import annotations

import pytest

from trueup.recording.arming.process import role

COMMANDS = {
    "python train.py": "run",
    "python -u -W ignore train.py --launcher torchrun": "run",
    "python -m trainer.run": "run",
    "python -c pass": "run",
    "python": "run",
    "python /opt/bin/torchrun --nproc-per-node 2 train.py": "launcher",
    "python -u /opt/bin/accelerate launch train.py": "launcher",
    "python -m torch.distributed.run train.py": "launcher",
    "python -X dev -m torch.distributed.launch train.py": "launcher",
    "python -m accelerate.commands.launch train.py": "launcher",
    "python -m deepspeed.launcher.launch train.py": "launcher",
    "python my_torchrun.py": "run",
    "python -c from multiprocessing.spawn import spawn_main; spawn_main() --multiprocessing-fork": "child",
    "python -c from multiprocessing.forkserver import main; main()": "child",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_role(command: str) -> None:
    words = command.split(" ", 2) if " -c from " in command else command.split()
    assert role(words) == COMMANDS[command]
