"""Pretrains a model from a recipe.

    accelerate launch recipes/pretrain.py recipes/demo.yaml train.steps=100 output_dir=runs/mine

Every key of a recipe can be overridden as `section.key=value`. Started again with the same output_dir, a run
resumes.

Exit codes; after all but the first three, the same command resumes from the last checkpoint:

    0    finished
    2    bad input, or training that diverged: one line on stderr
    65   every step was skipped as bad: no model is written
    70   a process made no progress for guard.hang_timeout seconds; its stacks are on stderr
    71   out of memory: the message says what would fit; earlier checkpoints are intact
    74   the disk is full, or a file may not grow further: earlier checkpoints are intact
    75   a server did not deliver the data, retries included; a checkpoint was saved
    129, 130, 138, 140, 143, 152   SIGHUP, SIGINT, SIGUSR1, SIGUSR2, SIGTERM, SIGXCPU: the step was finished
         and a checkpoint saved

`accelerate launch` and torchrun turn each failure into exit code 1. accelerate also prints a traceback of its
own, unless `--quiet` is given, and does not forward SIGTERM: send it to this process or to the process group.
With one process, `python recipes/pretrain.py RECIPE` trains the same without a launcher.

Several processes on CPUs (accelerate's `--cpu --num_processes 2` would start one):

    ACCELERATE_USE_CPU=true torchrun --standalone --nproc_per_node 2 recipes/pretrain.py recipes/demo.yaml
"""

import sys

from nalanda_cli import main

if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
    else:
        main(["train", *sys.argv[1:]])
