"""Pretrains a model from a recipe.

    accelerate launch recipes/pretrain.py recipes/demo.yaml train.steps=100 output_dir=runs/mine

Every key of a recipe can be overridden as `section.key=value`. Started again with the same output_dir, a run
resumes.

Exit code 0: finished. 2: bad input, 65: training diverged; one line on stderr says what to change. After all others
the same command resumes from the last checkpoint. docs/runs.md has the table.

`accelerate launch` and torchrun turn each failure into exit code 1; recipes/launch.py is torchrun with the true ones.
accelerate also prints a traceback of its own, unless `--quiet` is given, and does not forward SIGTERM: send it to this
process or to the process group. With one process, `python recipes/pretrain.py RECIPE` needs no launcher.

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
