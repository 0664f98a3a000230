"""The options of `nalanda check`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckOptions:
    layers: int | None = None
    """cut the model to so many layers, with random weights; by default the fewest that have every kind"""
    width: int | None = None
    """narrow the model to about this hidden size, with random weights"""
    only: list[str] | None = None
    """check this property alone; may be given several times"""
    plugin: list[str] | None = None
    """a module to import first, which registers the model's class: fla"""
    against: list[str] | None = None
    """another library that computes the converted model too: transformers, llama.cpp, mlx, fla"""
    trust_remote_code: bool = False
    """run the code in the model's repository"""
    compile: bool = False
    """compare torch.compile with eager too"""
    tensor_parallel: bool = False
    """compare the model split over two processes with the whole one"""
    seed: int = 0
    """of random weights and tokens"""
